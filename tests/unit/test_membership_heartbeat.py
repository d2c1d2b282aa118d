"""Calls of the heartbeat service to other peers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]

from rayhive.membership import heartbeat
from rayhive.membership.heartbeat import HeartbeatService
from rayhive.membership.letters import Letter
from rayhive.membership.protocol import FAILURES
from rayhive.membership.view import Heartbeat, MembershipView
from tests.unit.averaging_fakes import settle

OWN, PEER = b"a peer", b"b peer"
FAR = 3600.0


class Network:
    """Network daemon and DHT in which one peer answers, or does not."""

    initial_peers = ()

    def __init__(self) -> None:
        self.answers, self.calls, self.dials = True, 0, 0
        self.handler: Any = None
        self._client = self

    async def call_protobuf_handler(self, *_: Any) -> Any:
        self.calls += 1
        if not self.answers:
            raise OSError("no answer")
        return letter()

    async def add_protobuf_handler(self, name: str, handler: Any, *_: Any) -> None:
        self.handler = handler

    async def connect(self, *_: Any) -> None:
        self.dials += 1

    async def replicate(self, *_: Any) -> Network:
        return self

    async def get(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(value={})

    async def get_visible_maddrs(self) -> list[str]:
        return []

    async def ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    remove_protobuf_handler = disconnect = shutdown = ignore
    run_coroutine = store = ignore


def letter(*heartbeats: Heartbeat) -> BytesValue:
    """Return a message of the other peer."""
    records = [(each, 0.0, 0.0) for each in heartbeats]
    return BytesValue(value=Letter(PEER, 0.0, 7, 0, 0, 0, 0, 0, records).pack())


def test_an_announcement_calls_live_peers_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dial in vain to a lost peer would delay the dial after the return of the link."""

    async def body() -> None:
        network = Network()
        monkeypatch.setattr(heartbeat, "P2P", network)
        view = MembershipView(Heartbeat(OWN, 0.0), silence=FAR)
        service = HeartbeatService(
            network,  # type: ignore[arg-type]
            "run",
            view,
            heartbeat=FAR,
            expiration=FAR,
            on_change=lambda: None,
        )
        stop = asyncio.Event()
        running = asyncio.create_task(service.run(stop))
        await settle()
        answer = await network.handler(letter(Heartbeat(PEER, 0.0, 1, takes_part=True)), None)
        assert Letter.unpack(answer.value).sender == OWN
        await settle()
        assert network.calls == 1
        service.announce()
        await settle()
        assert network.calls == 2
        network.answers = False
        service.announce()
        await settle()
        assert network.calls == 2 + FAILURES
        assert view.lost() == {PEER}
        service.announce()
        await settle()
        assert (network.calls, network.dials) == (2 + FAILURES, 0)
        stop.set()
        await running

    asyncio.run(body())
