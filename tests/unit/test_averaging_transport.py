"""All-reduces over links: the same result as through the daemon, and the same counts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2

from rayhive.averaging.allreduce import MeasuredAllReduce
from rayhive.averaging.parts import PartMessage
from rayhive.averaging.streams import completed
from rayhive.averaging.transport import (
    AGGREGATE,
    DOWNLOAD,
    DirectTransport,
    StateSource,
    Transport,
    answering,
    no_link,
    sharing,
)
from rayhive.compression.payload import payload
from rayhive.compression.shares import reducer_shares
from rayhive.membership.links.link import WINDOW, Link
from rayhive.registry import CODECS
from tests.unit.allreduce_fakes import LIMIT, SHAPES, average, loopback
from tests.unit.link_fakes import Network, count_writes, peer, set_slow

CODECS_HERE = [
    name
    for name in CODECS.names()
    if CODECS.get(name).available() and not CODECS.get(name).uses_threshold
]


@asynccontextmanager
async def linked_group(
    peers: int,
    codec: str = "none",
    unlinked: Collection[int] = (),
    aggregates: dict[int, Callable[..., Any]] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[list[MeasuredAllReduce], Network]]:
    """Make a group whose members reach each other over links.

    Args:
        peers: Size of the group.
        codec: Name of the codec.
        unlinked: Peers that are reached by function calls instead.
        aggregates: Answers of single peers to calls over links.
        options: Arguments of the runners.
    """
    runners: list[MeasuredAllReduce] = []

    def aggregate(index: int, stream: Any, context: Any) -> Any:
        given = (aggregates or {}).get(index)
        return given(stream) if given else runners[index].rpc_aggregate_part(stream, context)

    handlers = [{AGGREGATE: answering(partial(aggregate, index))} for index in range(peers)]
    async with Network(handlers) as network:

        async def link_to(own: int, other: PeerID) -> Link | None:
            hidden = any(other == peer(index) for index in unlinked)
            return None if hidden else await network.links[own].get(other)

        def direct(own: int, by_calls: Transport) -> Transport:
            return DirectTransport(partial(link_to, own), by_calls)

        transports = {peer(index): partial(direct, index) for index in range(peers)}
        runners += loopback(peers, codec, transports=transports, **options)
        yield runners, network


def together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("peers", [2, 3, 5])
@pytest.mark.parametrize("codec", CODECS_HERE)
@pytest.mark.parametrize("differences", [False, True])
def test_every_way_leads_to_the_same_bits_and_counts(
    peers: int, codec: str, differences: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        by_daemon = loopback(peers, codec, differences=differences)
        expected = [together(result) for result in await average(by_daemon)]
        for unlinked, slow in (((), False), ((), True), ((0,), False)):
            set_slow(monkeypatch, slow)
            options = {"unlinked": unlinked, "differences": differences}
            async with linked_group(peers, codec, **options) as (runners, _):
                got = [together(result) for result in await average(runners)]
                assert all(await asyncio.gather(*(runner.drain(LIMIT) for runner in runners)))
            for mine, same in zip(got, expected, strict=True):
                if peers == 2:
                    assert torch.equal(mine, same)
                else:  # the order of the additions may differ
                    bound = 8 * CODECS.get(codec).relative_error + 1e-6
                    assert float((mine - same).norm()) <= bound * float(same.norm())
            if not differences:
                assert all(torch.equal(got[0], other) for other in got[1:])
            one = payload(SHAPES, codec=codec, peers=peers).bytes_per_transfer
            for counted in ("sent_bytes", "received_bytes"):
                total = sum(getattr(runner, counted) for runner in runners)
                assert total == 2 * (peers - 1) * one
            for runner in runners:
                assert runner.fraction() == 1.0
                assert not runner.banned() and not runner.failures

    asyncio.run(body())


@pytest.mark.parametrize("peers", [2, 4])
def test_members_send_their_parts_and_their_answers_in_one_write_each(
    peers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with linked_group(peers, "uniform8") as (runners, network):
            for links in network.links:  # dialled, and their handshakes over
                others = [peer(at) for at in range(peers) if links is not network.links[at]]
                await asyncio.gather(*map(links.get, others))
            writes = count_writes(monkeypatch)
            await average(runners)
            assert all(await asyncio.gather(*(runner.drain(LIMIT) for runner in runners)))
            await asyncio.sleep(0.01)
        assert len(writes) == 2 * peers * (peers - 1)

    asyncio.run(body())


def test_a_link_that_ends_in_the_middle_is_a_partial_round_of_both() -> None:
    async def body() -> None:
        cut = asyncio.Event()

        async def part_then_silence(stream: Any) -> AsyncIterator[Any]:
            async for _ in stream:
                cut.set()
                await asyncio.Event().wait()
                yield

        limits = {"sender_timeout": 1.0, "reducer_timeout": 2.0}
        async with linked_group(2, aggregates={1: part_then_silence}, **limits) as (
            runners,
            network,
        ):
            before = [together(runner.tensor_part_container.local_tensors) for runner in runners]
            averaging = asyncio.create_task(average(runners))
            await cut.wait()
            network.links[0].set_members([], [peer(1)])
            got = [together(result) for result in await averaging]
            for runner, result, own in zip(runners, got, before, strict=True):
                assert runner.fraction() < 1.0
                kept = result == own
                assert bool(kept.any()), "what was not averaged stays as it was"
            assert "LinkLost" in runners[0].failures[0]

    asyncio.run(body())


@pytest.mark.parametrize("ends", ["refused", "cut"])
def test_a_member_without_a_share_of_its_own_sees_that_its_exchange_ends(ends: str) -> None:
    """It reads answers once it has sent everything: more than a link takes ahead of the reader."""
    begun = asyncio.Event()

    async def reduce(stream: Any) -> AsyncIterator[Any]:
        await anext(stream)
        begun.set()
        if ends == "cut":
            await asyncio.Event().wait()
        yield PartMessage(averaging_pb2.BAD_GROUP_ID)

    async def body() -> None:
        tensors = [[torch.randn(2 * WINDOW)] for _ in range(2)]
        options: Any = {"tensors": tensors, "shares": reducer_shares([0, None])}
        async with linked_group(2, aggregates={1: reduce}, **options) as (runners, network):
            averaging = asyncio.create_task(average(runners[:1]))
            await begun.wait()
            if ends == "cut":
                network.links[1].set_members([], [peer(0)])
            await averaging
            assert {"refused": "BAD_GROUP_ID", "cut": "LinkLost"}[ends] in runners[0].failures[0]

    asyncio.run(body())


def state() -> list[averaging_pb2.DownloadData]:
    """Return the messages with a state."""
    parts = [runtime_pb2.Tensor(buffer=bytes([number]) * 9) for number in range(5)]
    first, *others = [averaging_pb2.DownloadData(tensor_part=part) for part in parts]
    first.metadata = b"metadata"
    return [first, *others]


@pytest.mark.parametrize("linked", [False, True], ids=["daemon", "link"])
def test_a_state_comes_over_a_link_or_through_the_daemon(linked: bool) -> None:
    heard: list[PeerID] = []

    async def share(request: Any, context: Any) -> AsyncIterator[Any]:
        assert isinstance(request, averaging_pb2.DownloadRequest)
        for message in state():
            yield message

    async def ended(request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in completed(share(request, context)):
            yield message

    class Stub:
        async def rpc_download_state(self, request: Any) -> AsyncIterator[Any]:
            return share(request, None)

    async def body() -> None:
        async with Network([{DOWNLOAD: sharing(ended)}] * 2) as network:
            link_to = network.links[0].get if linked else no_link
            source = StateSource(peer(1), link_to, lambda other: Stub(), heard.append)
            request = averaging_pb2.DownloadRequest()
            messages = [m async for m in await source.rpc_download_state(request)]
            assert [m for m in messages if m.ByteSize()] == state()

    asyncio.run(asyncio.wait_for(body(), LIMIT))
    assert heard == [] if linked else [peer(1)] * len(state())
