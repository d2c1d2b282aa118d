"""Extra tensors on a GPU: averaged by copies on the host, wherever the optimizer is."""

from __future__ import annotations

import pytest
import torch

from tests.unit.test_averaging_extra_tensors import THEIRS, averager, module, run_round
from tests.unit.test_averaging_gradient_extras import average

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("offload", [False, True])
def test_buffers_on_a_gpu_are_averaged(offload: bool, delayed: bool) -> None:
    parts = module().cuda()
    before = {name: buffer.clone() for name, buffer in parts.named_buffers()}
    made = averager(parts, offload)
    run_round(made, delayed)
    for name, buffer in parts.named_buffers():
        assert buffer.device.type == "cuda"
        if buffer.is_floating_point():
            assert bool((buffer == THEIRS).all()), name
        else:
            assert bool((buffer == before[name]).all()), name
    made.step_executor.shutdown()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_buffers_on_a_gpu_enter_rounds_of_gradients(dtype: torch.dtype) -> None:
    own = [torch.rand(5, device="cuda").to(dtype), torch.ones((), device="cuda", dtype=dtype)]
    average(own, 1.5)
    assert [(each.device.type, each.dtype) for each in own] == [("cuda", dtype)] * 2
    assert all(bool((each == 1.5).all()) for each in own)
