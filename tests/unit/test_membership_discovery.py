"""Discovery of peers in the DHT."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from rayhive.membership.discovery import Dialer, Discovery
from rayhive.membership.event_loop import Notifier
from rayhive.membership.view import Heartbeat, MembershipView

OWN, LOST, UNKNOWN, GONE = b"own", b"lost", b"unknown", b"gone"


class Entries:
    """DHT with an entry for each of some peers."""

    def __init__(self, **entries: bool) -> None:
        self.value = {name.encode(): SimpleNamespace(value=on) for name, on in entries.items()}

    async def get(self, key: str, **_: Any) -> Any:
        return self


def test_only_peers_that_are_not_known_are_called() -> None:
    """A dial in vain to a lost peer would delay the dial after the return of the link."""
    view = MembershipView(Heartbeat(OWN, 0.0), silence=60.0)
    view.receive(Heartbeat(LOST, 0.0, version=1, takes_part=True))
    view.give_up(LOST)
    called: list[bytes] = []

    async def call(peer: bytes) -> None:
        called.append(peer)

    discovery = Discovery(
        Entries(own=True, lost=True, unknown=True, gone=False),  # type: ignore[arg-type]
        "run_heartbeat",
        Dialer(view, Notifier(), 1.0),
        call,
        expiration=60.0,
        patience=1.0,
    )
    asyncio.run(discovery.search())
    assert called == [UNKNOWN]
