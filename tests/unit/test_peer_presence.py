"""How a peer looks for others that it has lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.membership import heartbeat
from rayhive.membership.heartbeat import HeartbeatService
from rayhive.membership.view import Heartbeat, MembershipView
from tests.unit.compression_fakes import OTHER

SMALL, LARGE = b"a peer", b"b peer"
PATIENCE = 5.0


def said_by(peer: bytes, version: int = 1) -> Heartbeat:
    return Heartbeat(peer, 0.0, version=version, takes_part=True)


def service_of(own: bytes, *, lost: bytes, client_mode: bool = False) -> Any:
    """Return the service of a peer that has given up another one."""
    view = MembershipView(Heartbeat(own, 0.0, client_mode=client_mode), silence=60.0)
    view.hear(said_by(lost))
    view.give_up(lost)
    return HeartbeatService(
        SimpleNamespace(initial_peers=[]),  # type: ignore[arg-type]
        "run",
        view,
        heartbeat=1.0,
        expiration=60.0,
        on_change=lambda: None,
    )


def run_with_a_way(
    monkeypatch: pytest.MonkeyPatch, body: Callable[[list[int]], Awaitable[None]]
) -> None:
    """Run it where everybody can be reached; it gets a list that counts who tried."""
    knocks: list[int] = []

    async def knock(addresses: Any) -> None:
        knocks.append(1)

    monkeypatch.setattr(heartbeat, "_knock", knock)
    asyncio.run(body(knocks))  # type: ignore[arg-type]


def test_of_two_that_lost_each_other_one_dials_and_the_other_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two that dial each other at the same time may both fail, and then not dial for a while."""

    async def body(knocks: list[int]) -> None:
        dials = service_of(SMALL, lost=LARGE)
        assert not await dials._is_back(LARGE, PATIENCE)
        waits = service_of(LARGE, lost=SMALL)
        waiting = asyncio.create_task(waits._is_back(SMALL, PATIENCE))
        await asyncio.sleep(0)
        waits._start_calls = lambda: None
        waits._take_in(waits._letter([[said_by(SMALL, 2).pack(), 0.0, 0.0]]))
        assert await asyncio.wait_for(waiting, PATIENCE / 2)
        assert len(knocks) == 2
        assert await waits._is_back(SMALL, PATIENCE) and len(knocks) == 2

    run_with_a_way(monkeypatch, body)


def test_who_is_not_called_after_all_dials_and_who_cannot_be_called_does_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(knocks: list[int]) -> None:
        waits = service_of(LARGE, lost=SMALL)
        waits._heartbeat = 0.02
        assert not await waits._is_back(SMALL, 0.02)
        client = service_of(LARGE, lost=SMALL, client_mode=True)
        assert not await asyncio.wait_for(client._is_back(SMALL, PATIENCE), PATIENCE / 2)

    run_with_a_way(monkeypatch, body)


def test_where_there_is_no_way_the_old_connection_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon would go on using it beside a new one, until it notices that the link was cut."""

    async def no_way(addresses: Any) -> None:
        raise OSError("no route to host")

    async def comes_meanwhile(addresses: Any) -> None:
        service.view.hear(said_by(SMALL, 2))
        raise OSError("it can call, and cannot be called")

    async def body() -> None:
        for knock, ended in ((no_way, 1), (comes_meanwhile, 1)):
            monkeypatch.setattr(heartbeat, "_knock", knock)
            with pytest.raises(OSError):
                await service._is_back(SMALL, PATIENCE)
            assert daemon.hung_up == ended

    service = service_of(LARGE, lost=SMALL)
    daemon = Daemon()
    service._p2p = SimpleNamespace(_client=daemon)
    asyncio.run(body())


def test_who_was_lost_is_not_dialled_for_an_old_entry_and_not_at_each_news() -> None:
    """A daemon that has dialled in vain does not dial once the link is back."""

    async def body() -> None:
        service = service_of(SMALL, lost=LARGE)
        called: list[bytes] = []
        unheard = b"c peer"

        async def get(*args: Any, **kwargs: Any) -> Any:
            here = SimpleNamespace(value=True)
            return SimpleNamespace(value={LARGE: here, SMALL: here, unheard: here})

        async def call(peer: bytes) -> None:
            called.append(peer)

        service._dht, service._call = SimpleNamespace(get=get), call
        await service._look()
        assert called == [unheard]
        service._news = {LARGE: asyncio.Event()}
        service.tell()
        assert not service._news[LARGE].is_set()
        service.view.hear(said_by(LARGE, 2))
        service.tell()
        assert service._news[LARGE].is_set()

    asyncio.run(body())


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


def test_a_relayed_peer_is_dialled_through_its_relay() -> None:
    own, relay = OTHER.to_base58(), "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    direct = "/ip4/10.0.0.2/tcp/31337"
    relayed = f"/ip4/10.0.0.1/tcp/31337/p2p/{relay}/p2p-circuit"
    dialled: list[str] = []

    async def connect(peer: Any, places: Any) -> None:
        dialled.extend(map(str, places))

    async def body() -> None:
        service = service_of(SMALL, lost=LARGE)
        service._p2p = SimpleNamespace(_client=SimpleNamespace(connect=connect))
        addresses = [f"{direct}/p2p/{own}", f"{relayed}/p2p/{own}", direct, relayed]
        await service._connect(OTHER, addresses)
        assert dialled == [direct, relayed, direct, relayed]

    asyncio.run(body())


def test_a_listening_relay_says_nothing_of_the_peer_behind_it() -> None:
    nobody = "/ip4/127.0.0.1/tcp/1"
    with pytest.raises(OSError):
        asyncio.run(heartbeat._knock([nobody]))
    asyncio.run(heartbeat._knock([f"{nobody}/p2p/{OTHER}/p2p-circuit"]))
    asyncio.run(heartbeat._knock([nobody, f"{nobody}/p2p/{OTHER}/p2p-circuit"]))


def test_a_peer_that_does_not_answer_has_one_request_of_the_daemon_at_a_time() -> None:
    """Each has a socket, and is not over when it is given up."""

    async def body() -> None:
        daemon = Daemon()
        service: Any = HeartbeatService.__new__(HeartbeatService)
        service.view = SimpleNamespace(lock=threading.Lock(), addresses_of=lambda peer: ())
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
