"""How a peer looks for others that it has lost."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.peer.presence import PresenceService
from tests.unit.compression_fakes import OTHER


class Daemon:
    """Connects to a peer that never says a word, until it does."""

    def __init__(self) -> None:
        self.asked = self.hung_up = 0
        self.answers = asyncio.Event()

    async def connect(self, peer: Any, places: Any) -> None:
        self.asked += 1
        await self.answers.wait()

    async def disconnect(self, peer: Any) -> None:
        self.hung_up += 1


def test_a_peer_that_does_not_answer_has_one_request_of_the_daemon_at_a_time() -> None:
    """Each has a socket, and is not over when it is given up."""

    async def body() -> None:
        daemon = Daemon()
        service: Any = PresenceService.__new__(PresenceService)
        service.census = SimpleNamespace(lock=threading.Lock(), addresses_of=lambda peer: ())
        service._p2p, service._connecting = SimpleNamespace(_client=daemon), {}
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(service._reconnect(OTHER.to_bytes()), 0.05)
        assert daemon.asked == 1
        daemon.answers.set()
        await asyncio.wait_for(service._reconnect(OTHER.to_bytes()), 5)
        await asyncio.wait_for(service._reconnect(OTHER.to_bytes()), 5)
        assert (daemon.asked, daemon.hung_up) == (3, 5)

    asyncio.run(body())
