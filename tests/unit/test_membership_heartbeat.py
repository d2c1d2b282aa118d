"""Calls of the heartbeat service to other peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]

from rayhive.membership import heartbeat
from rayhive.membership.heartbeat import HeartbeatService
from rayhive.membership.letters import Letter
from rayhive.membership.peer_links import PeerLinks
from rayhive.membership.protocol import FAILURES
from rayhive.membership.view import Heartbeat, MembershipView
from tests.unit.averaging_fakes import settle
from tests.unit.link_fakes import peer

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


def service_of(
    network: Network, view: MembershipView, on_change: Callable[[], None] = lambda: None
) -> HeartbeatService:
    return HeartbeatService(
        network,  # type: ignore[arg-type]
        "run",
        view,
        heartbeat=FAR,
        expiration=FAR,
        on_change=on_change,
    )


def test_an_announcement_calls_live_peers_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dial in vain to a lost peer would delay the dial after the return of the link."""

    async def body() -> None:
        network = Network()
        monkeypatch.setattr(heartbeat, "P2P", network)
        view = MembershipView(Heartbeat(OWN, 0.0), silence=FAR)
        service = service_of(network, view)
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


def test_the_service_ends_with_an_error_of_its_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that sends no heartbeats any more has to notice: to others it is dead."""

    async def body() -> None:
        network = Network()
        monkeypatch.setattr(heartbeat, "P2P", network)
        view = MembershipView(Heartbeat(OWN, 0.0), silence=FAR)

        def listen() -> None:
            if view.lost():
                raise ZeroDivisionError

        service = service_of(network, view, listen)
        running = asyncio.create_task(service.run(asyncio.Event()))
        await settle()
        await network.handler(letter(Heartbeat(PEER, 0.0, 1, takes_part=True)), None)
        network.answers = False
        service.announce()
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(running, 10)

    asyncio.run(body())


class Daemon(Network):
    """Network daemon of one of several peers, which reach each other."""

    def __init__(self, index: int, handlers: dict[tuple[Any, str], Any]) -> None:
        super().__init__()
        self.peer_id, self.handlers = peer(index), handlers
        self.called: list[str] = []

    async def run_coroutine(self, *_: Any, **__: Any) -> Any:
        return self

    async def add_protobuf_handler(self, name: str, handler: Any, *_: Any) -> None:
        self.handlers[self.peer_id, name] = handler

    async def call_protobuf_handler(self, other: Any, name: str, request: Any, _: Any) -> Any:
        self.called.append(name)
        if not self.answers:
            raise OSError("no answer")
        return await self.handlers[other, name](request, SimpleNamespace(remote_id=self.peer_id))

    async def get_visible_maddrs(self) -> list[str]:
        return [f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer_id}"]


@pytest.mark.parametrize("linked", [(True, True), (True, False)])
def test_calls_go_over_links_and_through_the_daemon_without_one(
    monkeypatch: pytest.MonkeyPatch, linked: tuple[bool, bool]
) -> None:
    """News arrive either way. With links, only the invitation passes the daemon."""

    async def of(daemon: Daemon) -> Daemon:
        return daemon

    async def seen(view: MembershipView, other: MembershipView) -> None:
        while (found := view.find(other.own.peer_id)) is None or found.round != other.own.round:
            await asyncio.sleep(0.01)

    async def body() -> None:
        monkeypatch.setattr(heartbeat, "P2P", SimpleNamespace(replicate=of))
        handlers: dict[tuple[Any, str], Any] = {}
        daemons = [Daemon(index, handlers) for index in range(2)]
        views = [MembershipView(Heartbeat(peer(i).to_bytes(), 0.0), silence=FAR) for i in range(2)]
        links = [PeerLinks("link", True, bulk=False) if each else None for each in linked]
        services = [
            HeartbeatService(
                daemon,  # type: ignore[arg-type]
                "run",
                view,
                heartbeat=FAR,
                expiration=FAR,
                on_change=lambda: None,
                links=link,
            )
            for daemon, view, link in zip(daemons, views, links, strict=True)
        ]
        stop = asyncio.Event()
        running = [asyncio.create_task(service.run(stop)) for service in services]
        await settle()
        hello = Letter(views[1].own.peer_id, 0.0, 7, 0, 0, 0, 0, 0, [(views[1].own, 0.0, 0.0)])
        await handlers[peer(0), "run.heartbeat"](BytesValue(value=hello.pack()), None)
        await seen(views[1], views[0])
        if all(linked):
            for own, link in enumerate(links):
                assert link is not None
                assert await link.get(peer(1 - own)) is not None
        for daemon in daemons:
            daemon.called.clear()
        for round_ in range(1, 4):
            for view, service in zip(views, services, strict=True):
                with view.lock:
                    view.announce(True, round=round_)
                service.announce()
            await asyncio.gather(seen(*views), seen(*views[::-1]))
        assert any("run.heartbeat" in daemon.called for daemon in daemons) != all(linked)
        stop.set()
        await asyncio.gather(*running)

    asyncio.run(asyncio.wait_for(body(), 60))
