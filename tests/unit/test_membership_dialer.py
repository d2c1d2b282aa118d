"""Connections to lost peers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayhive.membership.discovery import Dialer, probe
from rayhive.membership.event_loop import Notifier
from rayhive.membership.view import Heartbeat, MembershipView
from tests.unit.averaging_fakes import OTHER

SMALL, LARGE = b"a peer", b"b peer"
PATIENCE = 5.0


def announcement(peer: bytes, version: int = 1) -> Heartbeat:
    return Heartbeat(peer, 0.0, version=version, takes_part=True)


class Daemon:
    """Network daemon that connects once ``answers`` is set."""

    def __init__(self) -> None:
        self.hung_up = 0
        self.dialled: list[list[str]] = []
        self.answers = asyncio.Event()

    async def connect(self, peer: Any, places: Any) -> None:
        self.dialled.append([str(place) for place in places])
        await self.answers.wait()

    async def disconnect(self, peer: Any) -> None:
        self.hung_up += 1


class Lost:
    """A peer that has given up another one."""

    def __init__(
        self, own: bytes, lost: bytes, *, client_mode: bool = False, grace: float = 1.0
    ) -> None:
        self.view = MembershipView(Heartbeat(own, 0.0, client_mode=client_mode), silence=60.0)
        self.view.receive(announcement(lost))
        self.view.give_up(lost)
        self.arrivals, self.probes, self.error = Notifier(), 0, None
        self.dialer = Dialer(self.view, self.arrivals, grace, self.probe)
        self.daemon = self.dialer.daemon = Daemon()

    async def probe(self, addresses: Any) -> None:
        self.probes += 1
        if self.error is not None:
            raise self.error

    def comes_back(self, peer: bytes) -> None:
        self.view.receive(announcement(peer, 2))
        self.arrivals.notify()


def test_of_two_peers_that_lost_each_other_one_dials_and_the_other_is_called() -> None:
    """Two peers that dial each other at the same time may both fail, and then pause."""

    async def body() -> None:
        assert not await Lost(SMALL, LARGE).dialer.has_returned(LARGE, PATIENCE)
        waits = Lost(LARGE, SMALL)
        waiting = asyncio.create_task(waits.dialer.has_returned(SMALL, PATIENCE))
        await asyncio.sleep(0)
        waits.comes_back(SMALL)
        assert await asyncio.wait_for(waiting, PATIENCE / 2)
        assert await waits.dialer.has_returned(SMALL, PATIENCE)
        assert waits.probes == 1, "a live peer needs no probe"

    asyncio.run(body())


def test_a_peer_that_is_not_called_dials_after_a_while_and_a_client_at_once() -> None:
    async def body() -> None:
        waits = Lost(LARGE, SMALL, grace=0.02)
        assert not await waits.dialer.has_returned(SMALL, 0.02)
        client = Lost(LARGE, SMALL, client_mode=True)
        returned = client.dialer.has_returned(SMALL, PATIENCE)
        assert not await asyncio.wait_for(returned, PATIENCE / 2)

    asyncio.run(body())


def test_without_a_route_the_old_connection_is_closed() -> None:
    """The daemon would use it beside a new one, until it notices that the link was cut."""

    async def body() -> None:
        peer = Lost(LARGE, SMALL)
        peer.error = OSError("no route to host")
        with pytest.raises(OSError, match="no route"):
            await peer.dialer.has_returned(SMALL, PATIENCE)
        assert peer.daemon.hung_up == 1

    asyncio.run(body())


def test_a_peer_that_calls_during_the_probe_keeps_its_connection() -> None:
    async def body() -> None:
        peer = Lost(LARGE, SMALL)

        async def comes_meanwhile(addresses: Any) -> None:
            peer.comes_back(SMALL)
            raise OSError("it can call, and cannot be called")

        peer.dialer.probe = comes_meanwhile
        with pytest.raises(OSError, match="cannot be called"):
            await peer.dialer.has_returned(SMALL, PATIENCE)
        assert peer.daemon.hung_up == 0

    asyncio.run(body())


def test_a_relayed_peer_is_dialled_through_its_relay() -> None:
    own, relay = OTHER.to_base58(), "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    direct = "/ip4/10.0.0.2/tcp/31337"
    relayed = f"/ip4/10.0.0.1/tcp/31337/p2p/{relay}/p2p-circuit"

    async def body() -> None:
        peer = Lost(SMALL, LARGE)
        peer.daemon.answers.set()
        addresses = [f"{direct}/p2p/{own}", f"{relayed}/p2p/{own}", direct, relayed]
        await peer.dialer.connect(OTHER, addresses)
        assert peer.daemon.dialled == [[direct, relayed, direct, relayed]]

    asyncio.run(body())


def test_a_listening_relay_is_no_sign_of_the_peer_behind_it() -> None:
    closed = "/ip4/127.0.0.1/tcp/1"
    with pytest.raises(OSError):
        asyncio.run(probe([closed]))
    asyncio.run(probe([f"{closed}/p2p/{OTHER}/p2p-circuit"]))
    asyncio.run(probe([closed, f"{closed}/p2p/{OTHER}/p2p-circuit"]))


def test_a_peer_that_does_not_answer_has_one_request_of_the_daemon_at_a_time() -> None:
    """Each request holds a socket, also after it was given up."""

    async def body() -> None:
        peer = Lost(SMALL, OTHER.to_bytes())
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(peer.dialer.reconnect(OTHER.to_bytes()), 0.05)
        assert len(peer.daemon.dialled) == 1
        peer.daemon.answers.set()
        await asyncio.wait_for(peer.dialer.reconnect(OTHER.to_bytes()), 5)
        await asyncio.wait_for(peer.dialer.reconnect(OTHER.to_bytes()), 5)
        assert (len(peer.daemon.dialled), peer.daemon.hung_up) == (3, 5)

    asyncio.run(body())
