"""A sender that dies while its part waits does not stop the averaging of the other parts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hivemind.averaging.partition import BannedException, TensorPartReducer

from rayhive.averaging.aggregation import SteadyReducer

SHAPES = (torch.Size([2]), torch.Size([3]))


def part(index: int, value: float) -> torch.Tensor:
    return torch.full(SHAPES[index], value)


async def add(reducer: Any, sender: int, index: int, value: float) -> asyncio.Task[torch.Tensor]:
    task = asyncio.ensure_future(reducer.accumulate_part(sender, index, part(index, value)))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def hang_up(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_the_part_of_a_sender_that_hangs_up_still_counts() -> None:
    async def body() -> None:
        reducer = SteadyReducer(SHAPES, 3)
        dying = await add(reducer, 0, 0, 6.0)
        waiting = await add(reducer, 1, 0, 3.0)
        await hang_up(dying)
        reducer.on_sender_failed(0)
        own = await add(reducer, 2, 0, 0.0)
        assert torch.equal(await own, part(0, 3.0)) and torch.equal(await waiting, part(0, 3.0))
        rest = [await add(reducer, sender, 1, value) for sender, value in ((1, 1.0), (2, 2.0))]
        for average in await asyncio.gather(*rest):
            assert torch.equal(average, part(1, 1.5)), "without the dead"
        assert reducer.finished.is_set()

    asyncio.run(body())


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_weight_that_is_no_weight_is_refused(weight: float) -> None:
    """It would make the average not finite for all, or count a sender against the others."""

    async def body() -> None:
        reducer = SteadyReducer(SHAPES, 2)
        with pytest.raises(BannedException, match="weight"):
            await reducer.accumulate_part(0, 0, part(0, 6.0), weight=weight)
        assert reducer.refused == {0}
        reducer.on_sender_failed(0)
        assert torch.equal(await (await add(reducer, 1, 0, 3.0)), part(0, 3.0))

    asyncio.run(body())


def test_hiveminds_reducer_cancels_the_part_for_all_senders() -> None:
    async def body() -> None:
        reducer = TensorPartReducer(SHAPES, 3)
        dying, waiting = await add(reducer, 0, 0, 6.0), await add(reducer, 1, 0, 3.0)
        await hang_up(dying)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(body())


@pytest.mark.parametrize("turn", ["before", "at", "after"])
def test_a_part_that_was_counted_is_added_when_its_turn_comes(turn: str) -> None:
    async def body() -> None:
        reducer = SteadyReducer(SHAPES, 2)
        first = await add(reducer, 0, 0, 1.0)
        early = asyncio.ensure_future(reducer.accumulate_part(0, 1, part(1, 5.0)))
        await asyncio.sleep(0)
        if turn == "before":
            early.cancel()
            reducer.on_sender_failed(0)
        other = asyncio.ensure_future(reducer.accumulate_part(1, 0, part(0, 3.0)))
        if turn == "at":
            await asyncio.sleep(0)
            early.cancel()
            reducer.on_sender_failed(0)
        assert torch.equal(await first, part(0, 2.0)) and torch.equal(await other, part(0, 2.0))
        last = await add(reducer, 1, 1, 7.0)
        if turn == "after":
            await hang_up(early) if not early.done() else None
            reducer.on_sender_failed(0)
        assert torch.equal(await asyncio.wait_for(last, 5), part(1, 6.0))
        assert reducer.finished.is_set()

    asyncio.run(body())


def test_later_parts_of_a_sender_that_was_given_up_are_refused() -> None:
    async def body() -> None:
        reducer = SteadyReducer(SHAPES, 2)
        reducer.on_sender_failed(0)
        with pytest.raises(BannedException):
            await reducer.accumulate_part(0, 0, part(0, 1.0))
        assert torch.equal(await reducer.accumulate_part(1, 0, part(0, 4.0)), part(0, 4.0))
        assert torch.equal(await reducer.accumulate_part(1, 1, part(1, 2.0)), part(1, 2.0))

    asyncio.run(body())
