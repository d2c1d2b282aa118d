"""Work on a round while its step looks for a group."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayhive.averaging import preparation
from rayhive.averaging.gradient_averager import RayhivePowerSGDAverager
from rayhive.averaging.payload_policy import GroupRound
from rayhive.averaging.preparation import Preparation
from rayhive.averaging.steps import TRACE, StepTrace
from tests.unit.averaging_fakes import unstarted
from tests.unit.powersgd_fakes import InMemory, give

SHAPES = [(20, 30), (7,), (12, 3, 3, 3)]


@pytest.mark.parametrize("late", [False, True])
def test_work_begins_unless_the_group_is_there_before(late: bool) -> None:
    async def body() -> list[str]:
        done, begun = list[str](), asyncio.Event()

        async def work() -> None:
            begun.set()
            await asyncio.sleep(0)
            done.append("work")

        prepared = Preparation(work)
        if late:
            await begun.wait()
        await prepared.ended()
        await asyncio.sleep(2 * preparation.REQUEST_S)
        return done

    assert asyncio.run(body()) == ["work"] * late


def test_work_that_fails_does_not_fail_the_round() -> None:
    async def body() -> None:
        begun = asyncio.Event()

        async def work() -> None:
            begun.set()
            raise RuntimeError("the GPU is gone")

        prepared = Preparation(work)
        await begun.wait()
        await prepared.ended()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("of", "weight", "between", "begins"),
    [
        ("this step", 5.0, False, 0),
        ("another step", 5.0, False, 1),
        ("this step", 4.0, False, 1),
        ("this step", 5.0, True, 1),
    ],
)
def test_a_prepared_round_is_the_same_to_the_bit(
    of: str, weight: float, between: bool, begins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P is computed again if it was for another step or weight, or another round came between."""
    peers = [InMemory(SHAPES, 2, min_compression_ratio=0.2) for _ in range(2)]
    steps: dict[str, Future[Any]] = {"this step": Future(), "another step": Future()}

    async def alone(phase: str, tensors: Any, *_: Any) -> float:
        return 1.0

    def a_round(step: Future[Any] | None) -> GroupRound:
        return GroupRound(alone, {}, weight=5.0, step=step)

    def gradients(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape in SHAPES]

    async def body() -> int:
        prepared = peers[1]
        for peer in peers:
            give(peer, gradients(0))
            await peer.payload.average(peer.gradients, a_round(None))
            give(peer, gradients(1))
        await prepared.payload.prepare(prepared.gradients, weight, steps[of])
        if between:
            for peer in peers:
                await peer.payload.average(peer.gradients, a_round(None))
                give(peer, gradients(2))
        count, begin = 0, prepared.payload.factors.begin

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return begin(*args, **kwargs)

        monkeypatch.setattr(prepared.payload.factors, "begin", counted)
        for peer in peers:
            await peer.payload.average(peer.gradients, a_round(steps["this step"]))
        return count

    assert asyncio.run(body()) == begins
    states = [[*peer.gradients, *peer.payload.factors.error_feedback] for peer in peers]
    assert all(torch.equal(*pair) for pair in zip(*states, strict=True))


@pytest.mark.parametrize("runs", [False, True])
def test_nothing_is_prepared_while_a_former_round_runs(runs: bool) -> None:
    """A round whose step was given up may still compute with what a new one would overwrite."""
    averager = unstarted(RayhivePowerSGDAverager, SHAPES, averager_rank=2)
    prepared: list[float] = []

    async def prepare(tensors: Any, weight: float, step: Any) -> None:
        assert not averager.lock_averaged_tensors.acquire(block=False)
        prepared.append(weight)

    async def body() -> None:
        averager.payload.prepare = prepare
        trace = StepTrace(step=SimpleNamespace(weight=3.0))  # type: ignore[arg-type]
        TRACE.set(trace)
        averager.rounds.prepare(averager)
        assert trace.preparation is not None
        await asyncio.sleep(2 * preparation.REQUEST_S)
        await trace.preparation.ended()

    if runs:
        averager.lock_averaged_tensors.acquire()
    asyncio.run(body())
    assert prepared == [3.0] * (not runs)
    assert averager.lock_averaged_tensors.acquire(block=False) is not runs
