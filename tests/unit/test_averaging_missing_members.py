"""All-reduces between runners of one process in which a member's parts are missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from rayhive.averaging.allreduce import ABSENT, MeasuredAllReduce
from rayhive.averaging.allreduce_groups import DENSE, AllReduceGroups
from rayhive.averaging.tensor_parts import FEW
from tests.unit.allreduce_fakes import LIMIT, average, direct, loopback
from tests.unit.averaging_fakes import settle, stream_of

#: Limits that no all-reduce may wait out.
PATIENT = {"sender_timeout": 10 * LIMIT, "reducer_timeout": 11 * LIMIT}


async def unanswered(*_: Any) -> Any:
    """Call a runner behind a link that is cut: no answer, and no refusal either."""
    await asyncio.Event().wait()


def test_a_silent_peer_is_reported_by_senders_and_reducers(run: Any) -> None:
    async def body() -> None:
        runners = loopback(3, sender_timeout=0.1, reducer_timeout=0.3)
        *talking, mute = runners
        mute_name = str(mute.peer_id)
        elements = mute.tensor_part_container.total_size
        lost = sum(mute.tensor_part_container.elements(runners.index(mute)))
        await average(talking)
        for runner in talking:
            assert await runner.drain(LIMIT)
            assert runner.banned() == {mute_name}
            assert len(runner.failures) == 1 and mute_name in runner.failures[0]
            # A sender misses what the mute one reduces, a reducer a third of its inputs.
            assert runner.fraction() == pytest.approx(min(1 - lost / elements, 2 / 3))
            assert runner.sent_bytes > runner.received_bytes
        mute.finalize(cancel=True)

    run(body())


@pytest.mark.parametrize("heard", ["before", "as it begins", "never"])
def test_a_peer_that_was_lost_while_the_group_formed_is_not_awaited(run: Any, heard: str) -> None:
    async def body() -> None:
        lost = PeerID(b"peer 2")
        options = {"absent": frozenset({lost.to_bytes()} if heard == "before" else ())}
        limits = {"sender_timeout": 0.1, "reducer_timeout": 0.3}
        runners = loopback(3, calls={lost: unanswered}, **options, **limits)[:2]
        tensors = [runner.tensor_part_container.local_tensors for runner in runners]
        if heard == "as it begins":
            for runner in runners:
                await runner.forget({lost.to_bytes()})
        # what the two reduce is averaged over them alone; the share of the third is as it was
        got = [torch.cat([t.flatten() for t in result]) for result in await average(runners)]
        own = [torch.cat([t.flatten() for t in before]) for before in tensors]
        mean = torch.stack(own).mean(0)
        for result, before in zip(got, own, strict=True):
            averaged, kept = ((result - other).abs() < 1e-6 for other in (mean, before))
            assert bool((averaged | kept).all())
            assert 0.5 < float(averaged.float().mean()) < 1.0
        why = (
            "TimeoutError('nothing came for 0.3 s')"
            if heard == "never"
            else f"AllreduceException('{ABSENT}')"
        )
        for runner in runners:
            assert runner.banned() == {str(lost)}
            assert runner.failures == [f"reducer {lost}: {why}"]
            assert runner.fraction() < 1.0

    run(body())


@pytest.mark.parametrize("turns", range(12))
def test_a_peer_that_is_lost_in_any_turn_of_the_event_loop_is_not_awaited(
    run: Any, turns: int
) -> None:
    async def body() -> None:
        lost = PeerID(b"peer 2")
        runners = loopback(3, calls={lost: unanswered}, **PATIENT)[:2]
        averaging = asyncio.ensure_future(average(runners))
        for _ in range(turns):
            await asyncio.sleep(0)
        for runner in runners:
            await runner.forget({lost.to_bytes()})
        await averaging
        for runner in runners:
            assert runner.failures == [f"reducer {lost}: AllreduceException('{ABSENT}')"]
            assert runner.fraction() < 1.0

    run(body())


@pytest.mark.parametrize("code", ["BAD_GROUP_ID", "CANCELLED"])
def test_a_peer_that_refuses_parts_because_its_round_is_over_is_not_awaited(
    run: Any, code: str
) -> None:
    refusal = averaging_pb2.AveragingData(code=averaging_pb2.MessageCode.Value(code))

    async def refused(*_: Any) -> Any:
        return stream_of(refusal)

    async def body() -> None:
        over = PeerID(b"peer 2")
        runners = loopback(3, calls={over: refused}, **PATIENT)[:2]
        await average(runners)
        for runner in runners:
            assert runner.banned() == {str(over)}
            assert len(runner.failures) == 1 and f"sent {code}" in runner.failures[0]

    run(body())


@pytest.mark.parametrize("heard", ["before", "while it runs"])
def test_a_peer_that_left_and_cannot_be_heard_is_not_awaited(run: Any, heard: str) -> None:
    async def unheard(*_: Any) -> Any:
        raise ConnectionError("the link ended")

    async def body() -> None:
        gone = PeerID(b"peer 2")
        runners = loopback(3, calls={gone: unheard}, **PATIENT)[:2]
        several = [AllReduceGroups() for _ in runners]
        with ExitStack() as stack:
            for groups, runner in zip(several, runners, strict=True):
                if heard == "before":
                    await groups.set_parted(frozenset({gone}))
                stack.enter_context(groups.opened(b"group", [DENSE]))
                await groups.begin(b"group", runner)
            averaging = asyncio.ensure_future(average(runners))
            if heard == "while it runs":
                await settle()
                assert not averaging.done()
                for groups in several:
                    await groups.set_parted(frozenset({gone}))
            await averaging
        for runner in runners:
            assert runner.banned() == {str(gone)}

    run(body())


def one_that_hangs_up(answers_read: int, parts: int, turns: int = 0) -> Any:
    """Return a way to call a runner for a sender that goes without a word.

    Args:
        answers_read: Answers that it reads. After the last one, the answers are closed, as a link
            does; with none, the answering task is cancelled, as hivemind's daemon does.
        parts: Parts that it sends.
        turns: Turns of the event loop until then.
    """

    async def call(runner: MeasuredAllReduce, stream: Any, context: Any) -> Any:
        if context.remote_id != GONE:
            return await direct(runner, stream, context)
        requests: asyncio.Queue[Any] = asyncio.Queue()

        async def requested() -> AsyncIterator[Any]:
            while True:
                yield await requests.get()

        answers: Any = runner.rpc_aggregate_part(requested(), context)

        async def read() -> None:
            left = answers_read
            async for _ in answers:
                left -= 1
                if not left:
                    break

        reading = asyncio.ensure_future(read())
        await settle()
        for _ in range(parts):
            requests.put_nowait(await anext(stream))
        for _ in range(turns):
            await asyncio.sleep(0)
        if answers_read:
            await reading
            await answers.aclose()
        else:
            reading.cancel()
        raise ConnectionError("the sender hung up")

    return call


#: The member that hangs up.
GONE = PeerID(b"peer 2")
#: Decoding of parts on the event loop, and in threads.
DECODING = pytest.mark.parametrize("codec", ["none", "uniform8"])


async def average_without_one(codec: str, call: Any) -> None:
    """Check that two of three members do not await the third, which hangs up."""
    tensors = [[torch.full((3, 20 * FEW), float(peer))] for peer in range(3)]
    calls = {PeerID(b"peer %d" % peer): call for peer in range(2)}
    runners = loopback(3, codec, calls, tensors=tensors, **PATIENT)
    await average(runners)
    for runner in runners[:2]:
        assert runner.banned() == {str(GONE)}
        assert runner.failures == []
    assert [failure.partition(": ")[2] for failure in runners[2].failures] == [
        "ConnectionError('the sender hung up')"
    ] * 2


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("parts", [1, 2])
@DECODING
def test_a_peer_that_hangs_up_as_its_parts_arrive_is_not_awaited(
    codec: str, parts: int, turns: int
) -> None:
    # in real time, as threads work
    asyncio.run(average_without_one(codec, one_that_hangs_up(0, parts, turns)))


@pytest.mark.parametrize("parts", [1, 2, 3])
@DECODING
def test_a_peer_that_hangs_up_after_an_answer_is_not_awaited(codec: str, parts: int) -> None:
    asyncio.run(average_without_one(codec, one_that_hangs_up(1, parts)))


def test_parts_of_a_peer_that_left_count_if_they_have_arrived(run: Any) -> None:
    async def body() -> None:
        runners = loopback(3, **PATIENT)
        gone = runners[2].peer_id
        averaging = asyncio.ensure_future(average(runners))
        while not all(gone in runner.active_senders for runner in runners[:2]):
            await asyncio.sleep(0)
        for runner in runners[:2]:
            await runner.give_up([gone])
        await averaging
        for runner in runners:
            assert runner.banned() == set()
            assert runner.fraction() == 1.0

    run(body())
