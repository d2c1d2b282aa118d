"""Copies of gradients between a GPU and the memory in which they are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayhive.averaging.gradient_averager import RayhiveGradientAverager, shared_zeros
from rayhive.averaging.page_locks import SMALLEST, PageLocks
from tests.unit.averaging_fakes import unstarted

pytestmark = pytest.mark.gpu

SHAPES = [(SMALLEST, 3), (5,), (40, 30)]
#: Samples of a peer's batches.
BATCHES = (3, 5, 4)


def loaded(device: str, dtype: torch.dtype, **options: Any) -> Any:
    """Return an averager that has loaded the mean over samples of some batches."""
    parameters = [
        torch.nn.Parameter(torch.zeros(shape, device=device).to(dtype)) for shape in SHAPES
    ]

    def make(**others: Any) -> RayhiveGradientAverager:
        return RayhiveGradientAverager(**{**others, "parameters": parameters, **options})

    averager = unstarted(make, SHAPES)
    generator = torch.Generator().manual_seed(0)
    for samples in BATCHES:
        averager.expect_batch(samples)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).to(device, dtype)
            if options and parameter.grad is not None:
                parameter.grad.add_(gradient)
            else:
                parameter.grad = gradient
        averager.accumulate_grads_(samples)
    averager.load_accumulators_into_averager_()
    return averager


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_gpu_are_loaded_from_locked_pages(dtype: torch.dtype, reused: bool) -> None:
    options = {"reuse_grad_buffers": True} if reused else {}
    there, here = loaded("cuda", dtype, **options), loaded("cpu", dtype, **options)
    with there.get_tensors() as ours, here.get_tensors() as theirs:
        assert [tensor.is_pinned() for tensor in ours] == [True, False, False]
        for one, other in zip(ours, theirs, strict=True):
            assert one.dtype == torch.float32
            close = 1e-5 if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(one, other, rtol=close, atol=close)


def test_closed_locks_leave_the_memory_as_it_was() -> None:
    (tensor,) = shared_zeros([torch.zeros(SMALLEST)])
    locks = PageLocks([tensor])
    assert tensor.is_pinned()
    locks.close()
    assert not tensor.is_pinned()
