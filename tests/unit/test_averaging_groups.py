"""Parts that arrive before their group is registered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

from hivemind.averaging.group_info import GroupInfo
from hivemind.optim.grad_averager import GradientAverager
from hivemind.proto import averaging_pb2

from rayhive.averaging.allreduce_groups import DENSE, AllReduceGroups
from rayhive.averaging.gradient_averager import RayhiveGradientAverager
from tests.unit.averaging_fakes import OTHER, PEER, settle, stream_of, unstarted

SHAPES = [(4, 3)]
PATIENCE = 30.0  # never waited out: what is awaited happens


class Answering:
    """A runner that echoes."""

    async def rpc_aggregate_part(self, stream: Any, _: Any) -> AsyncIterator[Any]:
        async for message in stream:
            yield averaging_pb2.AveragingData(
                code=averaging_pb2.AVERAGED_PART, group_id=message.group_id
            )


class Hivemind(GradientAverager):
    """hivemind's averager, with what its process would have made."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pending_groups_registered = asyncio.Event()
        self.groups = SimpleNamespace(opened=self.opened, running=self._running_groups)

    def opened(self, group_id: bytes, phases: Sequence[str]) -> Any:
        return self._register_allreduce_group(GroupInfo(group_id, (PEER, OTHER), (b"", b"")))


def averager_of(kind: Any, **options: Any) -> Any:
    return unstarted(kind, SHAPES, **options)


async def first_answer(averager: Any, allreduce_id: bytes) -> Any:
    request = averaging_pb2.AveragingData(group_id=allreduce_id)
    answers = averager.rpc_aggregate_part(stream_of(request), SimpleNamespace(remote_id=OTHER))
    return await answers.__anext__()


async def other_group_ends(averager: Any) -> None:
    with averager.groups.opened(b"other", [DENSE]):
        await settle()
    await settle()


def test_a_part_waits_for_its_own_group_while_another_one_ends() -> None:
    async def body() -> None:
        averager = averager_of(RayhiveGradientAverager)
        averager.groups.expect(b"ours")
        waiting = asyncio.create_task(first_answer(averager, b"ours"))
        await other_group_ends(averager)
        assert not waiting.done()
        with averager.groups.opened(b"ours", [DENSE]):
            averager.groups.running[b"ours"].set_result(Answering())
            answer = await asyncio.wait_for(waiting, PATIENCE)
        assert answer.code == averaging_pb2.AVERAGED_PART

    asyncio.run(body())


def test_hivemind_refuses_a_part_when_another_group_ends() -> None:
    """The same events; if this fails the wait of our own is no longer needed."""

    async def body() -> None:
        averager = averager_of(Hivemind)
        waiting = asyncio.create_task(first_answer(averager, b"ours"))
        await other_group_ends(averager)
        assert (await asyncio.wait_for(waiting, PATIENCE)).code == averaging_pb2.BAD_GROUP_ID

    asyncio.run(body())


def test_phases_of_powersgd_are_separate_all_reduces() -> None:
    async def body() -> None:
        averager = averager_of(RayhiveGradientAverager)
        averager.groups.expect(b"ours")
        waiting = asyncio.create_task(first_answer(averager, b"oursPHASE_P"))
        await settle()
        with averager.groups.opened(b"ours", ["P", "Q"]):
            averager.groups.running[b"oursPHASE_P"].set_result(Answering())
            assert (await waiting).code == averaging_pb2.AVERAGED_PART
            unknown = asyncio.create_task(first_answer(averager, b"oursPHASE_Q"))
            await settle()
            assert not unknown.done()
        assert (await unknown).code == averaging_pb2.BAD_GROUP_ID, "its all-reduce never began"

    asyncio.run(body())


def test_a_sender_that_hangs_up_does_not_cancel_the_all_reduce() -> None:
    """hivemind awaits the runner directly: cancelling one waiting sender cancels it for all."""

    async def body() -> tuple[bool, bool]:
        seen = []
        for kind in (RayhiveGradientAverager, Hivemind):
            averager = averager_of(kind)
            with averager.groups.opened(b"ours", [DENSE]):
                sender = asyncio.create_task(first_answer(averager, b"ours"))
                await settle()
                sender.cancel()
                await settle()
                seen.append(averager.groups.running[b"ours"].cancelled())
        return seen[0], seen[1]

    assert asyncio.run(body()) == (False, True)


def test_a_late_part_is_refused_at_once_and_an_unknown_one_after_a_while() -> None:
    async def body() -> None:
        averager = averager_of(RayhiveGradientAverager, sender_timeout=0.05)
        with averager.groups.opened(b"over", [DENSE]):
            pass
        for allreduce_id in (b"over", b"never heard of"):
            answer = await asyncio.wait_for(first_answer(averager, allreduce_id), PATIENCE)
            assert answer.code == averaging_pb2.BAD_GROUP_ID

    asyncio.run(body())


def test_an_assembled_group_is_awaited_until_it_is_closed() -> None:
    async def body() -> None:
        groups = AllReduceGroups()
        groups.expect(b"group")
        waiting = asyncio.create_task(groups.runner(b"groupPHASE_P", patience=0.0))
        await settle()
        assert not waiting.done(), "a group that waits for its trigger is not unknown"
        groups.close(b"group")
        assert await waiting is None
        assert await groups.runner(b"nothing", patience=0.0) is None
        with groups.opened(b"next", [DENSE]):
            groups.running[b"next"].set_result(Answering())
            assert await groups.runner(b"next", patience=0.0) is not None

    asyncio.run(body())


def test_unfinished_all_reduces_are_listed_by_group() -> None:
    async def body() -> None:
        groups = AllReduceGroups()
        with groups.opened(b"ours", ["P", "Q", "P2"]):
            over = SimpleNamespace(succeeded=True)
            groups.running[b"oursPHASE_P"].set_result(over)
            groups.running[b"oursPHASE_Q"].set_result(SimpleNamespace(succeeded=False))
            assert list(groups.started(b"ours")) == ["P", "Q"]
            assert groups.unfinished(b"ours") == [b"oursPHASE_Q", b"oursPHASE_P2"]
        assert groups.started(b"ours") == {} and groups.unfinished(b"ours") == []

    asyncio.run(body())


def test_closing_a_group_that_never_began_refuses_its_parts() -> None:
    async def body() -> None:
        averager = averager_of(RayhiveGradientAverager)
        with averager.groups.opened(b"ours", [DENSE]):
            waiting = asyncio.create_task(first_answer(averager, b"ours"))
            await settle()
            assert not waiting.done()
        assert (await asyncio.wait_for(waiting, PATIENCE)).code == averaging_pb2.BAD_GROUP_ID

    asyncio.run(body())
