"""Events of the peers for the faults that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rayhive.events import Event


class EventFeed:
    """The latest events of each replica, and the futures of events to come."""

    def __init__(self) -> None:
        self._latest: dict[tuple[str, str], Event] = {}
        self._waiting: list[tuple[Callable[[Event], bool], asyncio.Future[Event]]] = []

    def put(self, event: Event) -> None:
        """Take an event of a peer."""
        if event.peer is not None:
            self._latest[event.kind, event.peer.partition(".")[0]] = event
        for matches, found in self._waiting:
            if not found.done() and matches(event):
                found.set_result(event)

    def last(self, kind: str, peer: str) -> Event | None:
        """Return the last event of a kind by any incarnation of a replica, if there is one."""
        return self._latest.get((kind, peer))

    async def wait(
        self,
        kind: str,
        peer: str | None,
        timeout: float,
        *,
        incarnation: str | None,
        count: int,
        fields: dict[str, Any],
    ) -> Event | None:
        """Return a future event; None if it does not come in time.

        Args:
            kind: Kind of the event.
            peer: Replica that has to send it; None for any.
            timeout: Longest wait [s].
            incarnation: Incarnation that has to send it; None for any.
            count: Number of matching events to wait for; the last one is returned.
            fields: Values that fields of the event must have.
        """
        left = count

        def matches(event: Event) -> bool:
            nonlocal left
            found = (
                event.kind == kind
                and event.peer is not None
                and incarnation in (None, event.peer)
                and peer in (None, event.peer.partition(".")[0])
                and all(event.get(key) == value for key, value in fields.items())
            )
            left -= found
            return found and left == 0

        entry = matches, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            return await asyncio.wait_for(entry[1], timeout)
        except asyncio.TimeoutError:
            return None
        finally:
            self._waiting.remove(entry)
