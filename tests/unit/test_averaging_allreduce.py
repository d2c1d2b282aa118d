"""All-reduces between runners of one process: no network, every byte counted."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID, ServicerBase
from hivemind.proto import averaging_pb2

import rayhive.compression  # noqa: F401 - registers the codecs
from rayhive.averaging.allreduce import ABSENT, HANGS_UP, MeasuredAllReduce, _CountedStub
from rayhive.averaging.round_result import RoundResult
from rayhive.averaging.streams import until
from rayhive.compression.payload import payload
from rayhive.registry import CODECS
from tests.unit.averaging_fakes import settle, stream_of

SHAPES = [(30, 20), (13,), (1,), (7, 3, 3)]
PART_SIZE = 256
LIMIT = 30.0


def loopback(peers: int, codec: str = "none", **options: Any) -> list[MeasuredAllReduce]:
    """Return the runners of one group, connected to each other by function calls."""
    runners: dict[PeerID, MeasuredAllReduce] = {}

    class Loopback(ServicerBase):
        @classmethod
        def get_stub(cls, p2p: Any, peer: PeerID, *, namespace: str | None = None) -> Any:
            context = SimpleNamespace(remote_id=p2p.peer_id)

            async def rpc_aggregate_part(stream: Any) -> Any:
                return runners[peer].rpc_aggregate_part(stream, context)

            return SimpleNamespace(rpc_aggregate_part=rpc_aggregate_part)

    names = tuple(PeerID(f"peer {index}".encode()) for index in range(peers))
    for index, name in enumerate(names):
        generator = torch.Generator().manual_seed(index)
        runners[name] = MeasuredAllReduce(
            p2p=SimpleNamespace(peer_id=name),
            servicer_type=Loopback,
            prefix=None,
            group_id=b"group",
            tensors=[torch.randn(shape, generator=generator) for shape in SHAPES],
            ordered_peer_ids=names,
            peer_fractions=(1 / peers,) * peers,
            part_size_bytes=PART_SIZE,
            compression=CODECS.get(codec)().build(),
            **options,
        )
    return list(runners.values())


async def average(runners: Sequence[MeasuredAllReduce]) -> list[list[torch.Tensor]]:
    """Run the group; return what every peer's tensors became."""

    async def one(runner: MeasuredAllReduce) -> list[torch.Tensor]:
        before = runner.tensor_part_container.local_tensors
        return [tensor + delta async for tensor, delta in _zip(before, runner)]

    return await asyncio.wait_for(asyncio.gather(*map(one, runners)), LIMIT)


async def _zip(
    tensors: Sequence[torch.Tensor], runner: MeasuredAllReduce
) -> AsyncIterator[tuple[torch.Tensor, torch.Tensor]]:
    index = 0
    async for delta in runner:
        yield tensors[index], delta
        index += 1


@pytest.mark.parametrize("peers", [2, 3, 5])
@pytest.mark.parametrize("codec", ["none", "float16", "uniform8", "scaled_float16"])
def test_a_group_sends_its_payload_to_and_fro(peers: int, codec: str) -> None:
    async def body() -> None:
        runners = loopback(peers, codec)
        tensors = [runner.tensor_part_container.local_tensors for runner in runners]
        expected = [torch.stack(column).mean(0) for column in zip(*tensors, strict=True)]
        for got in await average(runners):
            error = sum(float((a - b).norm()) for a, b in zip(got, expected, strict=True))
            norm = sum(float(b.norm()) for b in expected)
            assert error <= (8 * CODECS.get(codec).relative_error + 1e-6) * norm
        assert all([await runner.drain(LIMIT) for runner in runners])
        one = payload(SHAPES, codec=codec, part_size_bytes=PART_SIZE).bytes_per_transfer
        assert sum(runner.sent_bytes for runner in runners) == 2 * (peers - 1) * one
        assert sum(runner.received_bytes for runner in runners) == 2 * (peers - 1) * one
        for runner in runners:
            record = runner.record("dense")
            assert record["fraction"] == 1.0
            assert record["seconds"] >= 0
            assert not runner.banned() and not runner.failures

    asyncio.run(body())


def test_a_silent_peer_shows_on_both_sides() -> None:
    async def body() -> None:
        *talking, mute = loopback(3, sender_timeout=0.1, reducer_timeout=0.3)
        mute_name = str(mute.peer_id)
        elements = mute.tensor_part_container.total_size
        lost = sum(part.numel() for part in mute.parts_for_local_averaging)
        await average(talking)
        for runner in talking:
            assert await runner.drain(LIMIT)
            assert runner.banned() == {mute_name}
            assert len(runner.failures) == 1 and mute_name in runner.failures[0]
            # A sender misses what the mute one reduces, a reducer a third of its inputs.
            assert runner.fraction() == pytest.approx(min(1 - lost / elements, 2 / 3))
            assert runner.sent_bytes > runner.received_bytes
        mute.finalize(cancel=True)

    asyncio.run(body())


@pytest.mark.parametrize("heard", ["before", "as it begins", "never"])
def test_a_peer_that_was_lost_while_the_group_formed_is_not_waited_for(heard: str) -> None:
    async def body() -> None:
        lost = PeerID(b"peer 2")
        absent = frozenset({lost.to_bytes()} if heard == "before" else ())
        runners = loopback(3, absent=absent, sender_timeout=0.1, reducer_timeout=0.3)[:2]
        tensors = [runner.tensor_part_container.local_tensors for runner in runners]
        for runner in runners:  # a link that is cut: no answer, and no refusal either
            stub = runner._get_peer_stub
            runner._get_peer_stub = through(runner, lost, stub)
            if heard == "as it begins":
                await runner.forget({lost.to_bytes()})
        # what the two reduce is averaged over them alone; the share of the third is as it was
        got = [torch.cat([t.flatten() for t in result]) for result in await average(runners)]
        own = [torch.cat([t.flatten() for t in before]) for before in tensors]
        mean = torch.stack(own).mean(0)
        for result, before in zip(got, own, strict=True):
            averaged, kept = ((result - other).abs() < 1e-6 for other in (mean, before))
            assert bool((averaged | kept).all())
            assert 0.5 < float(averaged.float().mean()) < 1.0
        why = "TimeoutError()" if heard == "never" else f"AllreduceException('{ABSENT}')"
        for runner in runners:
            assert runner.banned() == {str(lost)}
            assert runner.failures == [f"reducer {lost}: {why}"]
            assert runner.fraction() < 1.0

    asyncio.run(body())


def through(runner: MeasuredAllReduce, lost: PeerID, stub: Any) -> Any:
    """Return what finds the remote side of peers for a runner, and nobody behind that of one."""

    def stub_of(peer: PeerID) -> Any:
        return _CountedStub(SILENT, runner, 1) if peer == lost else stub(peer)

    return stub_of


async def _never(_: Any) -> Any:
    await asyncio.Event().wait()


#: The remote side of a peer behind a link that is cut.
SILENT = SimpleNamespace(rpc_aggregate_part=_never)


def test_a_reducer_keeps_the_stream_open_until_the_sender_hangs_up() -> None:
    """If it closed first, p2pd could lose its last answer."""

    async def body() -> None:
        runner, sender = loopback(2)
        context = SimpleNamespace(remote_id=sender.peer_id)
        mine = runner.ordered_peer_ids.index(runner.peer_id)
        requests = [message async for message in sender._generate_input_for_peer(mine)]
        assert all(message.tensor_part.chunks == HANGS_UP for message in requests)
        others = asyncio.create_task(runner._communicate_with_peer(runner.peer_id))
        answers = runner.rpc_aggregate_part(stream_of(*requests), context)
        for _ in requests:
            answer = await asyncio.wait_for(answers.__anext__(), LIMIT)
            assert answer.code == averaging_pb2.AVERAGED_PART
        ending = asyncio.create_task(answers.__anext__())
        assert await runner.drain(LIMIT), "all is answered, though the stream is open"
        await settle()
        assert not ending.done()
        ending.cancel()  # what hivemind does when the sender is gone
        with pytest.raises(asyncio.CancelledError):
            await ending
        await others
        assert runner.banned() == set()
        for ended in (runner, sender):
            ended.finalize(cancel=True)

    asyncio.run(body())


def test_a_plain_sender_is_not_kept_waiting() -> None:
    """hivemind's waits for the reducer to close, and says nothing in ``chunks``."""

    async def body() -> None:
        runner, sender = loopback(2)
        context = SimpleNamespace(remote_id=sender.peer_id)
        mine = runner.ordered_peer_ids.index(runner.peer_id)
        requests = [message async for message in sender._generate_input_for_peer(mine)]
        for message in requests:
            message.tensor_part.chunks = 0
        others = asyncio.create_task(runner._communicate_with_peer(runner.peer_id))
        answers = runner.rpc_aggregate_part(stream_of(*requests), context)

        async def collect() -> list[Any]:
            return [answer async for answer in answers]

        # Far below the patience with a sender that hangs up.
        assert len(await asyncio.wait_for(collect(), 5.0)) == len(requests)
        await others
        for ended in (runner, sender):
            ended.finalize(cancel=True)

    asyncio.run(body())


def test_drain_gives_up_after_its_patience() -> None:
    async def body() -> None:
        runner, sender = loopback(2)
        assert await runner.drain(0.01) is False
        await runner._ban_sender(sender.peer_id)
        assert await runner.drain(0.01) is True, "who was given up is not waited for"
        for ended in (runner, sender):
            ended.finalize(cancel=True)

    asyncio.run(body())


def test_reading_until_the_last_message_closes_the_stream() -> None:
    async def body() -> None:
        closed = asyncio.Event()

        async def endless() -> AsyncIterator[int]:
            try:
                for number in range(10**9):
                    yield number
            finally:
                closed.set()

        assert [n async for n in until(endless(), lambda n: n == 3)] == [0, 1, 2, 3]
        assert closed.is_set()

    asyncio.run(body())


def test_results_cross_processes_whole() -> None:
    phase = {"seconds": 0.5, "sent_bytes": 10, "received_bytes": 20}
    result = RoundResult(
        {PeerID(b"a"): 1, PeerID(b"b"): 2},
        phases=(
            {"name": "P", "fraction": 0.75, **phase},
            {"name": "Q", "fraction": 1.0, **phase},
        ),
        banned=("b",),
        failures=("reducer b: gone",),
        wasted_bytes=3,
        attempts=2,
    )
    assert result.fraction == 0.75 and not result.complete
    assert (result.sent_bytes, result.received_bytes, result.group_size) == (20, 40, 2)
    copy = pickle.loads(pickle.dumps(result))
    assert isinstance(copy, RoundResult)
    assert dict(copy) == dict(result) and vars(copy) == vars(result)
    assert copy.summary()["banned"] == ["b"]
    failed = RoundResult(error="nobody came")
    assert (failed.group_size, failed.fraction, failed.complete) == (0, 0.0, False)
