"""Links between peers of one process, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from typing import Any

import pytest
from hivemind.p2p import PeerID

from rayhive.membership.links.handshake import Invitation
from rayhive.membership.links.link import Handler, Link, Packet, Reply, no_reply
from rayhive.membership.links.links import Links, OnParted, nobody_asks
from rayhive.membership.links.pace import Pace

#: Longest duration of a test [s].
LIMIT = 20.0
#: Changes an invitation on its way to the guest.
Change = Callable[[Invitation], Invitation]


def unchanged(invitation: Invitation) -> Invitation:
    """Return an invitation as it is."""
    return invitation


async def at_once() -> None:
    """Do not wait."""


def peer(index: int) -> PeerID:
    """Return the id of a peer; ids rise with the index."""
    return PeerID(f"peer {index}".encode())


class Network:
    """Peers that invite each other by function calls and connect over loopback.

    Args:
        handlers: Answers to calls, for all peers or one mapping for each.
        listening: Peers that others can connect to; all by default.
        trusted: Whether connections are plain, for each peer.
        change: Changes invitations on their way.
        pause: Awaited before each invitation.
        reply: Answers the questions to each of them.
        on_parted: As for the links.

    Attributes:
        heard: Peers that showed that they live, by the peer that noticed.
    """

    def __init__(
        self,
        handlers: Sequence[Mapping[str, Handler]],
        listening: Sequence[int] | None = None,
        trusted: Sequence[bool] | None = None,
        change: Change = unchanged,
        pause: Callable[[], Awaitable[None]] = at_once,
        reply: Reply = no_reply,
        on_parted: OnParted = nobody_asks,
    ) -> None:
        self.links: list[Links] = []
        self.heard: list[list[PeerID]] = [[] for _ in handlers]
        for index, mapping in enumerate(handlers):
            trusts = bool(trusted and trusted[index])
            heard = self.heard[index].append
            answers = (heard, reply, True, on_parted)
            ask = self._asks(index, change, pause)
            links = Links(peer(index), mapping, ask, trusts, *answers)
            if listening is None or index in listening:
                links.listen(["127.0.0.1"])
            self.links.append(links)

    def _asks(
        self, guest: int, change: Change, pause: Callable[[], Awaitable[None]]
    ) -> Callable[[PeerID], Awaitable[Invitation]]:
        async def ask(host: PeerID) -> Invitation:
            await pause()
            index = int(host.to_bytes().split()[-1])
            return change(self.links[index].invite(peer(guest)))

        return ask

    async def __aenter__(self) -> Network:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await asyncio.gather(*(links.close() for links in self.links))


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the bytes of each write to a connection from now on."""
    writes: list[int] = []
    send = socket.socket.sendmsg

    def counted(self: socket.socket, *args: Any) -> int:
        writes.append(send(self, *args))
        return writes[-1]

    monkeypatch.setattr(socket.socket, "sendmsg", counted)
    return writes


def set_slow(monkeypatch: pytest.MonkeyPatch, slow: bool = True) -> None:
    """Make all links slow, or none."""
    monkeypatch.setattr(Pace, "is_slow", lambda pace: slow)


async def packets(*bodies: bytes | memoryview) -> AsyncGenerator[Packet, None]:
    """Yield packets with these bodies; the heads are their numbers."""
    for number, body in enumerate(bodies):
        yield Packet(str(number).encode(), body)


async def echo(requests: AsyncIterator[Packet], caller: PeerID) -> AsyncGenerator[Packet, None]:
    """Answer each packet with itself, and the caller in the head."""
    async for head, body in requests:
        yield Packet(caller.to_bytes() + b":" + head, body)


def run(body: Coroutine[Any, Any, None]) -> None:
    """Run a test, which must end within :data:`LIMIT`."""
    asyncio.run(asyncio.wait_for(body, LIMIT))


async def linked(network: Network, caller: int = 0, called: int = 1) -> Link:
    """Return the link of a peer to another one, which must exist."""
    link = await network.links[caller].get(peer(called))
    assert link is not None
    return link
