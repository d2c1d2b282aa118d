"""Links of averagers that introduce each other through a network daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from rayhive.averaging.parts import PartMessage
from rayhive.averaging.transport import AGGREGATE, aggregate_over, answering
from rayhive.membership.peer_links import PeerLinks, hosts_in
from tests.unit.link_fakes import peer

LIMIT = 20.0


class Daemons:
    """Network daemons of some peers, as function calls. A peer without a handler is hivemind's."""

    def __init__(self) -> None:
        self.handlers: dict[tuple[PeerID, str], Any] = {}

    def of(self, own: PeerID) -> Any:
        """Return the connection of a peer to its daemon."""

        async def visible() -> list[str]:
            return [f"/ip4/127.0.0.1/tcp/1/p2p/{own}"]

        async def add(name: str, handler: Any, _: type) -> None:
            self.handlers[own, name] = handler

        async def remove(name: str) -> None:
            del self.handlers[own, name]

        async def call(other: PeerID, name: str, request: Any, _: type) -> Any:
            return await self.handlers[other, name](request, SimpleNamespace(remote_id=own))

        return SimpleNamespace(
            peer_id=own,
            get_visible_maddrs=visible,
            add_protobuf_handler=add,
            remove_protobuf_handler=remove,
            call_protobuf_handler=call,
        )


async def echo(stream: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
    """Answer every message with its weight and the id of the caller."""
    async for message in stream:
        yield PartMessage(message.code, None, context.remote_id.to_bytes(), message.weight)


async def weights(*values: float) -> AsyncIterator[Any]:
    for value in values:
        yield PartMessage(1, None, b"", value)


def members(*indices: int) -> list[bytes]:
    return [peer(index).to_bytes() for index in indices]


@pytest.mark.parametrize("client", [None, 0, 1])
def test_members_call_each_other_over_links(client: int | None) -> None:
    """A peer in client mode is not called through its daemon, and begins its links itself."""

    async def body() -> None:
        daemons = Daemons()
        both = [PeerLinks("link", index != client) for index in range(2)]
        for index, links in enumerate(both):
            await links.open(daemons.of(peer(index)), {AGGREGATE: answering(echo)})
            links.set_members(members(0, 1), [])
        for index, links in enumerate(both):
            link = await links.get(peer(1 - index))
            assert link is not None
            answers = [a async for a in aggregate_over(link, weights(1.0, 0.25))]
            assert [answer.weight for answer in answers] == [1.0, 0.25]
            assert {answer.group_id for answer in answers} == {peer(index).to_bytes()}
        await asyncio.gather(*(links.close() for links in both))
        assert not daemons.handlers

    asyncio.run(asyncio.wait_for(body(), LIMIT))


def test_a_plain_hivemind_peer_has_no_link() -> None:
    async def body() -> None:
        links = PeerLinks("link", True)
        await links.open(Daemons().of(peer(0)), {AGGREGATE: answering(echo)})
        links.set_members(members(0, 1), [])
        assert await links.get(peer(1)) is None
        await links.close()

    asyncio.run(asyncio.wait_for(body(), LIMIT))


def test_an_averager_that_has_not_begun_has_no_links() -> None:
    async def body() -> None:
        links = PeerLinks("link", True)
        links.set_members(members(0, 1), [])
        assert await links.get(peer(1)) is None
        await links.close()

    asyncio.run(body())


def test_relays_and_names_are_no_places_to_connect_to() -> None:
    addresses = [
        "/ip4/10.0.0.1/tcp/4001/p2p/Qm",
        "/ip6/::1/tcp/4001/p2p/Qm",
        "/ip4/10.0.0.9/tcp/4001/p2p/Qm/p2p-circuit/p2p/Qm",
        "/dns4/example.org/tcp/4001/p2p/Qm",
    ]
    assert hosts_in(addresses) == ["10.0.0.1", "::1"]
