"""Events of the peers for the faults that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from rayhive.events import Event
from rayhive.events.event import E


class EventFeed:
    """The latest events of each replica, and the futures of events to come."""

    def __init__(self) -> None:
        self._latest: dict[tuple[type[Event], str], Event] = {}
        self._waiting: list[tuple[Callable[[Event], bool], asyncio.Future[Event]]] = []

    def put(self, event: Event) -> None:
        """Take an event of a peer."""
        if event.peer is not None:
            self._latest[type(event), event.peer.partition(".")[0]] = event
        for matches, found in self._waiting:
            if not found.done() and matches(event):
                found.set_result(event)

    def last(self, record: type[E], peer: str) -> E | None:
        """Return the last event of a kind by any incarnation of a replica, if there is one."""
        return cast(E | None, self._latest.get((record, peer)))

    async def wait(
        self,
        record: type[E],
        peer: str,
        timeout: float,
        *,
        incarnation: str | None,
        count: int,
        fault: str | None,
    ) -> E | None:
        """Return a future event; None if it does not come in time.

        Args:
            record: Kind of the event.
            peer: Replica that has to send it.
            timeout: Longest wait [s].
            incarnation: Incarnation that has to send it; None for any.
            count: Number of matching events to wait for; the last one is returned.
            fault: Required value of the field ``fault``; None for any.
        """
        left = count

        def matches(event: Event) -> bool:
            nonlocal left
            found = (
                isinstance(event, record)
                and event.peer is not None
                and incarnation in (None, event.peer)
                and event.peer.partition(".")[0] == peer
                and fault in (None, getattr(event, "fault", None))
            )
            left -= found
            return found and left == 0

        entry = matches, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            return cast(E, await asyncio.wait_for(entry[1], timeout))
        except asyncio.TimeoutError:
            return None
        finally:
            self._waiting.remove(entry)
