"""A round that is tried again after averages have arrived says what it averaged."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.averaging.matchmaking import MatchmakingException

from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.gradient_averager import RayhiveGradientAverager
from rayhive.averaging.steps import StepTrace
from tests.unit.allreduce_fakes import average, loopback
from tests.unit.averaging_fakes import announced_group, unstarted

SHAPES = [(40, 100), (7, 3)]


@pytest.mark.parametrize("arrived", [0, 1])
@pytest.mark.parametrize("error_feedback", [False, True])
def test_averages_of_a_failed_attempt_do_not_count_in_the_retry(
    monkeypatch: pytest.MonkeyPatch, error_feedback: bool, arrived: int
) -> None:
    """The average is 1. A peer averages 0 with 2, or with an average of the first attempt."""
    averager = unstarted(RayhiveGradientAverager, SHAPES, error_feedback=error_feedback)
    averager.cancellations = SimpleNamespace(send=lambda *_: None)
    shares: list[float] = []
    fails = True

    async def allreduce(self: Any, tensors: Any, info: Any, key: bytes, **options: Any) -> None:
        own, other = loopback(2, tensors=[tensors, [torch.full_like(t, 2.0) for t in tensors]])
        self.groups.running[key].set_result(own)
        if not fails:
            await average([own, other])
            return
        parts = own.tensor_part_container
        for index in range(arrived):
            parts.register_processed_part(1, index, torch.ones_like(parts.part(1, index)))
        shares.append(parts.averaged_size / parts.total_size)
        raise RuntimeError("the network is gone")

    monkeypatch.setattr(MeasuredAverager, "_run_allreduce_inplace_", allreduce)

    async def attempt(trace: StepTrace) -> Any:
        group = announced_group(1.0, 1.0)
        with averager.rounds.opened(group):
            return await averager.rounds.run(averager, group, trace)

    async def step() -> Any:
        nonlocal fails
        trace = StepTrace()
        with pytest.raises(MatchmakingException):
            await attempt(trace)
        fails = False
        return await attempt(trace)

    result = asyncio.run(step())
    (share,) = shares
    assert (0.1 < share < 0.9) if arrived else share == 0
    with averager.get_tensors() as tensors:
        wrong = sum(int((tensor != 1).sum()) for tensor in tensors)
    damaged = 0.0 if error_feedback else share
    assert wrong == round(damaged * sum(tensor.numel() for tensor in tensors))
    assert result.fraction == pytest.approx(1 - damaged)
    assert asyncio.run(attempt(StepTrace())).fraction == 1.0, "the next step has tensors of its own"
