"""Contribution of a peer to a round: the mean of its gradients over samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hivemind.optim.grad_averager import GradientAverager
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rayhive.averaging.gradient_averager import RayhiveGradientAverager, RayhivePowerSGDAverager
from tests.unit.averaging_fakes import unstarted

SHAPES = [(3, 2), (4,)]
POWERSGD = {"averager_rank": 1, "min_compression_ratio": 0.1}
KINDS = [(RayhiveGradientAverager, {}), (RayhivePowerSGDAverager, POWERSGD)]
COUNTS = ("local_samples_accumulated", "local_times_accumulated", "_anchor_batch_size")


def add_batch(averager: Any, batch_size: int, gradients: list[torch.Tensor]) -> None:
    """Let a batch with these mean gradients pass, as autograd and the optimizer do."""
    if hasattr(averager, "expect_batch"):
        averager.expect_batch(batch_size)
    for parameter, gradient in zip(averager.parameters, gradients, strict=True):
        if averager.reuse_grad_buffers and parameter.grad is not None:
            parameter.grad.add_(gradient)
        else:
            parameter.grad = gradient.clone()
    averager.accumulate_grads_(batch_size)


def drawn(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def loaded(averager: Any) -> list[torch.Tensor]:
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as tensors:
        return [tensor.clone() for tensor in tensors]


#: Samples of a batch, the end of a round, or a batch that was expected and had no gradient.
ACTIONS = st.lists(
    st.one_of(st.integers(1, 9), st.integers(1, 5000), st.sampled_from(["reset", "skipped"])),
    max_size=12,
)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(("kind", "options"), KINDS)
@given(actions=ACTIONS)
@example(actions=[32, 32, 1, 32, "reset", 1, 32, 32, "reset", 32, 32, 32])
@settings(max_examples=40, deadline=None)
def test_a_contribution_is_the_mean_over_samples(
    kind: Any, options: dict[str, Any], reuse: bool, actions: list[int | str]
) -> None:
    averager = unstarted(kind, SHAPES, reuse_grad_buffers=reuse, **options)
    averager.reset_accumulated_grads_()
    sums, samples = [torch.zeros(shape, dtype=torch.double) for shape in SHAPES], 0
    for seed, action in enumerate(actions):
        if action == "reset":
            averager.reset_accumulated_grads_()
            sums, samples = [torch.zeros_like(total) for total in sums], 0
        elif action == "skipped":
            averager.expect_batch(7 * seed + 1)
        else:
            gradients = drawn(seed)
            add_batch(averager, int(action), gradients)
            samples += int(action)
            for total, gradient in zip(sums, gradients, strict=True):
                total.add_(gradient.double(), alpha=int(action))
        assert averager.local_samples_accumulated == samples
        for mine, total in zip(loaded(averager), sums, strict=True):
            mean = total / max(1, samples)
            torch.testing.assert_close(mine.double(), mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reuse", [False, True])
@given(
    batch_size=st.integers(1, 100),
    actions=st.lists(st.sampled_from(["batch", "reset", "load"]), max_size=12),
)
@settings(max_examples=30, deadline=None)
def test_equal_batches_accumulate_as_in_hivemind(
    reuse: bool, batch_size: int, actions: list[str]
) -> None:
    ours, theirs = (
        unstarted(kind, SHAPES, reuse_grad_buffers=reuse, warn=False)
        for kind in (RayhiveGradientAverager, GradientAverager)
    )
    for seed, action in enumerate([*actions, "load"]):
        for averager in (ours, theirs):
            if action == "reset":
                averager.reset_accumulated_grads_()
            elif action == "batch":
                add_batch(averager, batch_size, drawn(seed))
        if action != "reset":  # what was expected before is no count
            assert [getattr(ours, c) for c in COUNTS] == [getattr(theirs, c) for c in COUNTS]
        if action == "load":
            for mine, other in zip(loaded(ours), loaded(theirs), strict=True):
                assert torch.equal(mine, other)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_reset_leaves_no_gradient_of_the_last_round(kind: Any, options: dict[str, Any]) -> None:
    averager = unstarted(kind, SHAPES, **options)
    add_batch(averager, 2, [torch.full(shape, float("nan")) for shape in SHAPES])
    averager.reset_accumulated_grads_()
    assert all(not tensor.any() for tensor in loaded(averager))
    averager.reset_accumulated_grads_()
    ones = [torch.ones(shape) for shape in SHAPES]
    add_batch(averager, 2, ones)
    add_batch(averager, 4, ones)
    # the mean of ones, whatever the batches: hivemind divides by their number and gets 1.5
    assert all(bool((tensor == 1.0).all()) for tensor in loaded(averager))


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("batches", [(32, 32, 32), (32, 32, 1, 32), (1, 32, 32, 1, 32), (32, 8)])
def test_gradients_of_one_have_a_mean_of_one(reuse: bool, batches: tuple[int, ...]) -> None:
    averager = unstarted(RayhiveGradientAverager, SHAPES, reuse_grad_buffers=reuse)
    averager.reset_accumulated_grads_()
    for batch_size in batches:
        add_batch(averager, batch_size, [torch.ones(shape) for shape in SHAPES])
    for tensor in loaded(averager):
        torch.testing.assert_close(tensor, torch.ones_like(tensor), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_many_batches_of_any_parameters_count_alike(
    dtype: torch.dtype, kind: Any, options: dict[str, Any]
) -> None:
    averager = unstarted(kind, SHAPES, dtype=dtype, **options)
    for _ in range(1000):  # in bfloat16, 256 + 1 is 256
        add_batch(averager, 8, [torch.ones(shape, dtype=dtype) for shape in SHAPES])
    for tensor in loaded(averager):
        torch.testing.assert_close(tensor, torch.ones_like(tensor), rtol=1e-5, atol=0.0)


def test_averages_have_the_strides_of_their_parameters() -> None:
    """A fused optimizer reads a gradient in the order of memory of its parameter."""
    averager = unstarted(RayhiveGradientAverager, [])
    parameter = torch.nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last))
    averager = RayhiveGradientAverager([parameter], dht=averager.dht, prefix="test", start=False)
    with averager.get_tensors() as (averaged,):
        assert averaged.stride() == parameter.stride()


def test_averages_of_gradients_in_64_bits_have_32() -> None:
    """Requests had 8 bytes an element, answers 4, and the plan predicted 4."""
    averager = unstarted(RayhiveGradientAverager, SHAPES, dtype=torch.float64)
    with averager.get_tensors() as tensors:
        assert {tensor.dtype for tensor in tensors} == {torch.float32}


def test_sparse_gradients_become_dense() -> None:
    """Those of an embedding ended the first round with an error."""
    table = torch.nn.Embedding(5, 2, sparse=True)
    fake = unstarted(RayhiveGradientAverager, [])
    averager = RayhiveGradientAverager([table.weight], dht=fake.dht, prefix="test", start=False)
    table.weight.grad = None  # as Lightning's zero_grad leaves it
    table(torch.tensor([1, 1, 3])).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    averager.accumulate_grads_(3)
    assert not table.weight.grad.is_sparse
    averager.load_accumulators_into_averager_()
    expected = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0]).view(-1, 1).expand(5, 2)
    with averager.get_tensors() as (averaged,):
        assert torch.equal(averaged, expected)


def test_reused_buffers_refuse_a_batch_of_unannounced_size() -> None:
    averager = unstarted(RayhiveGradientAverager, SHAPES, reuse_grad_buffers=True)
    averager.reset_accumulated_grads_()
    for parameter in averager.parameters:
        parameter.grad = torch.ones_like(parameter)
    averager.accumulate_grads_(32)  # the first of a round counts for nothing before it
    averager.accumulate_grads_(32)
    with pytest.raises(ValueError, match=r"batch of 1 .* expect_batch\(1\)"):
        averager.accumulate_grads_(1)


def test_the_first_batch_is_kept_when_its_gradients_are_overwritten() -> None:
    averager = unstarted(RayhiveGradientAverager, SHAPES)
    averager.reset_accumulated_grads_()
    first = drawn(0)
    add_batch(averager, 1, first)
    for parameter in averager.parameters:
        parameter.grad.zero_()
    assert all(map(torch.equal, loaded(averager), first))
