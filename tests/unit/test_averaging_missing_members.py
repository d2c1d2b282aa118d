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


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("arrived", [1, 2])
@pytest.mark.parametrize("codec", ["none", "uniform8"])  # at once, and in threads
def test_a_peer_that_hangs_up_as_its_parts_arrive_is_not_awaited(
    codec: str, arrived: int, turns: int
) -> None:
    gone = PeerID(b"peer 2")

    async def hung_up(runner: MeasuredAllReduce, stream: Any, context: Any) -> Any:
        """Call a runner as hivemind's daemon does, which cancels the answers then."""
        if context.remote_id != gone:
            return await direct(runner, stream, context)
        requests: asyncio.Queue[Any] = asyncio.Queue()

        async def requested() -> AsyncIterator[Any]:
            while True:
                yield await requests.get()

        async def answer() -> None:
            async for _ in runner.rpc_aggregate_part(requested(), context):
                pass

        answering = asyncio.ensure_future(answer())
        await settle()
        for _ in range(arrived):
            requests.put_nowait(await anext(stream))
        for _ in range(turns):
            await asyncio.sleep(0)
        answering.cancel()
        raise ConnectionError("the sender hung up")

    async def body() -> None:
        tensors = [[torch.full((3, 20 * FEW), float(peer))] for peer in range(3)]
        calls = {PeerID(b"peer %d" % peer): hung_up for peer in range(2)}
        runners = loopback(3, codec, calls, tensors=tensors, **PATIENT)
        await average(runners)
        for runner in runners[:2]:
            assert runner.banned() == {str(gone)}
            assert runner.failures == []
        assert len(runners[2].failures) == 2

    asyncio.run(body())  # in real time, as threads work


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
