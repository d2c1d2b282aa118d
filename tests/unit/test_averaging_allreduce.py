"""All-reduces between runners of one process: no network, every byte counted."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from rayhive.averaging import tensor_parts
from rayhive.averaging.allreduce import MeasuredAllReduce
from rayhive.averaging.answers import AVERAGE, HANGS_UP
from rayhive.averaging.round_result import RoundResult
from rayhive.averaging.streams import until
from rayhive.compression.payload import payload
from rayhive.registry import CODECS
from tests.unit.allreduce_fakes import LIMIT, MIXED, SHAPES, average, loopback
from tests.unit.averaging_fakes import settle, stream_of

CODECS_WITHOUT_THRESHOLD = [
    name
    for name in CODECS.names()
    if CODECS.get(name).available() and not CODECS.get(name).uses_threshold
]


@pytest.mark.parametrize("peers", [2, 3, 5, 8])
@pytest.mark.parametrize("codec", CODECS_WITHOUT_THRESHOLD)
def test_all_members_get_the_same_average_to_the_bit(peers: int, codec: str) -> None:
    async def body() -> None:
        runners = loopback(peers, codec)
        for number, runner in enumerate(runners):
            runner.weight = 0.3 + number
        first, *rest = await average(runners)
        for other in rest:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))

    asyncio.run(body())


@pytest.mark.parametrize("codec", CODECS_WITHOUT_THRESHOLD)
def test_small_parts_are_encoded_by_the_event_loop_and_large_ones_by_threads(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    encode, threads = tensor_parts.encode, set()

    def noted(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return encode(*args)

    async def sent(few: int) -> list[int]:
        monkeypatch.setattr(tensor_parts, "FEW", few)
        runners = loopback(3, codec)
        first, *rest = await average(runners)
        for other in rest:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
        return [runner.sent_bytes for runner in runners]

    monkeypatch.setattr(tensor_parts, "encode", noted)
    by_loop = asyncio.run(sent(few=30_000))
    assert threads == {threading.main_thread()}
    assert asyncio.run(sent(few=100)) == by_loop
    assert (len(threads) > 1) is (codec != "none")


@pytest.mark.parametrize("peers", [1, 2, 3])
@pytest.mark.parametrize("codec", ["none", "uniform8"])
def test_tensors_that_are_not_contiguous_are_averaged_in_place(peers: int, codec: str) -> None:
    """Such as convolutions in ``channels_last``, and transposed parameters."""

    def strided(index: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        weights = torch.randn(8, 3, 5, 5, generator=generator)
        return [
            weights.to(memory_format=torch.channels_last),
            torch.randn(40, 60, generator=generator).t(),
            torch.randn(7, generator=generator),
        ]

    async def body() -> None:
        tensors = [strided(index) for index in range(peers)]
        mean = [torch.stack(column).mean(0) for column in zip(*tensors, strict=True)]
        runners = loopback(peers, codec, tensors=tensors)
        averages = await average(runners)
        for own, got in zip(tensors, averages, strict=True):
            assert not own[0].is_contiguous() and not own[1].is_contiguous()
            for tensor, value, exact in zip(own, got, mean, strict=True):
                assert torch.equal(tensor, value)
                assert float((tensor - exact).norm()) < 0.05 * float(exact.norm())

    asyncio.run(body())


def test_what_is_owed_of_tensors_that_are_not_contiguous_is_kept() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(40, 60, generator=generator)

    async def debt(tensor: torch.Tensor) -> torch.Tensor:
        (runner,) = loopback(1, "uniform8", tensors=[[tensor]])
        made, owed = runner.tensor_part_container, torch.zeros_like(tensor)
        parts = type(made)(
            [tensor], made._partition, compression=made.compression, infos=made._infos, owed=[owed]
        )
        for index in range(parts.num_parts_by_peer[0]):
            value = parts.part(0, index).clone()
            parts.sent(0, index)
            parts.register_processed_part(0, index, value)
        assert len([each async for each in parts.iterate_output_tensors()]) == 1
        return owed

    debts = [asyncio.run(debt(each)) for each in (values.t(), values.t().contiguous())]
    assert debts[0].any() and torch.equal(*debts)


@pytest.mark.parametrize("peers", [2, 3, 5])
@pytest.mark.parametrize("codec", ["none", "float16", "uniform8", "scaled_float16"])
def test_a_group_sends_its_payload_there_and_back(peers: int, codec: str) -> None:
    async def body() -> None:
        runners = loopback(peers, codec)
        tensors = [runner.tensor_part_container.local_tensors for runner in runners]
        expected = [torch.stack(column).mean(0) for column in zip(*tensors, strict=True)]
        for got in await average(runners):
            error = sum(float((a - b).norm()) for a, b in zip(got, expected, strict=True))
            norm = sum(float(b.norm()) for b in expected)
            assert error <= (8 * CODECS.get(codec).relative_error + 1e-6) * norm
        assert all([await runner.drain(LIMIT) for runner in runners])
        one = payload(SHAPES, codec=codec, peers=peers).bytes_per_transfer
        assert sum(runner.sent_bytes for runner in runners) == 2 * (peers - 1) * one
        assert sum(runner.received_bytes for runner in runners) == 2 * (peers - 1) * one
        for runner in runners:
            record = runner.record("dense")
            assert record["fraction"] == 1.0
            assert record["seconds"] >= 0
            assert not runner.banned() and not runner.failures

    asyncio.run(body())


async def in_pairs_backwards(function: Any, items: Any, *_: Any) -> AsyncIterator[Any]:
    """Apply a function to every second item before the one before it; yield results in order."""
    waiting: list[Any] = []
    async for item in items:
        waiting.append(item)
        if len(waiting) == 2:
            second = function(waiting.pop())
            yield function(waiting.pop())
            yield second
    for item in waiting:
        yield function(item)


@pytest.mark.parametrize("shapes", [[(300_000,)], [(100_000,), (5,), (200_000,)]])
def test_threads_may_decode_parts_in_any_order(
    monkeypatch: pytest.MonkeyPatch, shapes: list[tuple[int, ...]]
) -> None:
    async def body() -> None:
        monkeypatch.setattr("rayhive.averaging.allreduce.in_threads", in_pairs_backwards)
        generator = torch.Generator().manual_seed(0)
        tensors = [[torch.randn(s, generator=generator) for s in shapes] for _ in range(2)]
        runners = loopback(2, tensors=tensors)
        assert max(runners[0].tensor_part_container.num_parts_by_peer) > 1
        expected = [torch.stack(column).mean(0) for column in zip(*tensors, strict=True)]
        for got in await average(runners):
            for found, wanted in zip(got, expected, strict=True):
                torch.testing.assert_close(found, wanted)
        assert not any(runner.failures or runner.banned() for runner in runners)

    asyncio.run(body())


@pytest.mark.parametrize("bad", [[2], [0, 2], [0, 1, 2]])
def test_a_peer_whose_own_parts_are_refused_ends_with_the_others(bad: list[int]) -> None:
    """Nobody waits for a timeout, and the other peers get the average of all they sent."""

    async def body() -> None:
        tensors = [[torch.full((40_000,), float(at)), torch.ones(7)] for at in range(3)]
        for at in bad:
            tensors[at][0].fill_(torch.nan)
        runners = loopback(3, tensors=tensors)
        assert min(runners[0].tensor_part_container.num_parts_by_peer) > 1
        good = [at for at in range(3) if at not in bad]
        for at, (large, small) in enumerate(await average(runners)):
            if at in good:
                assert torch.equal(large, torch.full((40_000,), sum(good) / len(good)))
            else:
                assert bool(large.isnan().all())
            assert torch.equal(small, torch.ones(7))
        for at, runner in enumerate(runners):
            assert runner.refused() == {runners[each].peer_id for each in bad}
            assert runner.got_everything == (at in good)
            assert runner.fraction() < 1.0 and await runner.drain(LIMIT)

    asyncio.run(body())


async def noted(stream: Any, seen: list[Any]) -> AsyncIterator[Any]:
    """Pass a stream through, and note its messages."""
    async for message in stream:
        seen.append(message)
        yield message


def test_a_reducer_keeps_the_stream_open_until_the_sender_hangs_up() -> None:
    """If it closed first, p2pd could lose its last answer."""
    requests: list[Any] = []
    answers: list[Any] = []
    streams: list[Any] = []

    async def keep_open(runner: MeasuredAllReduce, stream: Any, context: Any) -> Any:
        streams.append(runner.rpc_aggregate_part(noted(stream, requests), context))
        return noted(streams[0], answers)  # closed by the sender after the last answer

    async def body() -> None:
        reducer, sender = runners = loopback(2, calls={PeerID(b"peer 0"): keep_open})
        await average(runners)
        assert all(message.tensor_part.chunks == HANGS_UP for message in requests)
        assert [answer.code for answer in answers] == [averaging_pb2.AVERAGED_PART] * len(requests)
        assert all(answer.tensor_part.chunks == AVERAGE for answer in answers)
        ending = asyncio.create_task(streams[0].__anext__())
        assert await reducer.drain(LIMIT), "all is answered, though the stream is open"
        await settle()
        assert not ending.done()
        ending.cancel()  # as hivemind does when the sender is gone
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert reducer.banned() == sender.banned() == set()

    asyncio.run(body())


def test_a_reducer_closes_the_stream_of_a_sender_of_hivemind() -> None:
    """Such a sender waits for the reducer to close, and leaves ``chunks`` at 0."""
    requests: list[Any] = []
    answers: list[Any] = []

    async def plain(stream: Any) -> AsyncIterator[Any]:
        async for message in stream:
            message.tensor_part.chunks = 0
            requests.append(message)
            yield message

    async def read_to_the_end(runner: MeasuredAllReduce, stream: Any, context: Any) -> Any:
        async def collect() -> None:
            answers.extend([a async for a in runner.rpc_aggregate_part(plain(stream), context)])

        # Far below the patience with a sender that hangs up.
        await asyncio.wait_for(collect(), 5.0)
        return stream_of(*answers)

    async def body() -> None:
        group = loopback(2, calls={PeerID(b"peer 0"): read_to_the_end}, **MIXED)
        before = [runner.tensor_part_container.local_tensors for runner in group]
        means = [torch.stack(column).mean(0) for column in zip(*before, strict=True)]
        for averaged in await average(group):
            for got, mean in zip(averaged, means, strict=True):
                assert torch.allclose(got, mean, atol=1e-6)
        assert len(answers) == len(requests) > 0
        assert not any(answer.tensor_part.chunks for answer in answers), "differences"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("how", "succeeded"),
    [({}, True), ({"cancel": True}, False), ({"exception": AllreduceException("")}, False)],
)
def test_an_all_reduce_that_was_broken_off_has_not_succeeded(how: Any, succeeded: bool) -> None:
    async def body() -> None:
        runner, other = loopback(2)
        assert not runner.succeeded
        runner.finalize(**how)
        assert runner.succeeded == succeeded  # else the other members are told
        other.finalize()

    asyncio.run(body())


def test_drain_gives_up_after_its_patience() -> None:
    async def body() -> None:
        runner, sender = loopback(2)
        assert await runner.drain(0.01) is False
        await runner.forget({sender.peer_id.to_bytes()})
        assert await runner.drain(0.01) is True, "a lost sender is not awaited"
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


def test_results_survive_pickling() -> None:
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
    assert result.fraction == 0.75
    assert (result.sent_bytes, result.received_bytes, result.group_size) == (20, 40, 2)
    copy = pickle.loads(pickle.dumps(result))
    assert isinstance(copy, RoundResult)
    assert dict(copy) == dict(result) and vars(copy) == vars(result)
    assert copy.summary()["banned"] == ["b"]


@pytest.mark.parametrize("codec", ["blockwise4", "blockwise2", "sign", "topk"])
def test_hiveminds_partition_excludes_codecs_that_hivemind_cannot_decode(codec: str) -> None:
    with pytest.raises(AllreduceException, match="plain hivemind peer"):
        loopback(2, codec, shares=None)
