"""Gradients that pile up for a round: what hivemind's averager holds, ours holds, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hivemind.optim.grad_averager import GradientAverager
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.compression.averagers import RayhiveGradientAverager, RayhivePowerSGDAverager
from tests.unit.compression_fakes import unstarted

SHAPES = [(3, 2), (4,)]
POWERSGD = {"averager_rank": 1, "min_compression_ratio": 0.1}
COUNTS = ("local_samples_accumulated", "local_times_accumulated", "_anchor_batch_size")


def set_gradients(averager: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in averager.parameters:
        new = torch.randn(parameter.shape, generator=generator)
        if averager.reuse_grad_buffers and parameter.grad is not None:
            parameter.grad.add_(new)  # as autograd does
        else:
            parameter.grad = new


def loaded(averager: Any) -> list[torch.Tensor]:
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as tensors:
        return [tensor.clone() for tensor in tensors]


#: A batch of so many samples, the end of a round, or a look at what would be averaged.
ACTIONS = st.lists(st.one_of(st.integers(1, 9), st.sampled_from(["reset", "load"])), max_size=12)


@pytest.mark.parametrize("reuse", [False, True])
@given(actions=ACTIONS)
@settings(max_examples=40, deadline=None)
def test_it_holds_what_hiveminds_holds(reuse: bool, actions: list[int | str]) -> None:
    pair = [
        unstarted(kind, SHAPES, reuse_grad_buffers=reuse, warn=False)
        for kind in (RayhiveGradientAverager, GradientAverager)
    ]
    for step, action in enumerate([*actions, "load"]):
        for averager in pair:
            if action == "reset":
                averager.reset_accumulated_grads_()
            elif isinstance(action, int):
                set_gradients(averager, step)
                averager.accumulate_grads_(action)
        ours, theirs = pair
        assert [getattr(ours, c) for c in COUNTS] == [getattr(theirs, c) for c in COUNTS]
        if action == "load":
            for mine, other in zip(loaded(ours), loaded(theirs), strict=True):
                assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("kind", "options"), [(RayhiveGradientAverager, {}), (RayhivePowerSGDAverager, POWERSGD)]
)
def test_nothing_of_a_round_gets_into_the_next(kind: Any, options: dict[str, Any]) -> None:
    averager = unstarted(kind, SHAPES, **options)
    for parameter in averager.parameters:
        parameter.grad = torch.full_like(parameter, float("nan"))
    averager.accumulate_grads_(2)
    averager.reset_accumulated_grads_()
    assert all(not tensor.any() for tensor in loaded(averager))
    averager.reset_accumulated_grads_()
    for parameter in averager.parameters:
        parameter.grad = torch.ones_like(parameter)
    averager.accumulate_grads_(2)
    averager.accumulate_grads_(4)  # of twice the samples: counts twice
    assert all(bool((tensor == 1.5).all()) for tensor in loaded(averager))


def test_the_first_batch_is_kept_when_its_gradients_are_overwritten() -> None:
    averager = unstarted(RayhiveGradientAverager, SHAPES)
    averager.reset_accumulated_grads_()
    set_gradients(averager, 0)
    first = [parameter.grad.clone() for parameter in averager.parameters]
    averager.accumulate_grads_(1)
    for parameter in averager.parameters:
        parameter.grad.zero_()
    assert all(map(torch.equal, loaded(averager), first))
