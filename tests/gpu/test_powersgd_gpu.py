"""PowerSGD's factors on a GPU: the same as on the CPU, for the averager of a trainer that uses it.

``python -m tests.gpu.test_powersgd_gpu DEVICE`` runs rounds between two peers whose factors are
computed there, and prints a report.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch

from rayhive.compression.powersgd.factors import Factors
from rayhive.compression.powersgd.kernels import gram_schmidt
from tests.integration.averager_harness import MARK, run_module
from tests.integration.averager_harness import SHAPES as SWARM_SHAPES
from tests.unit.averaging_fakes import unstarted

pytestmark = pytest.mark.gpu

SHAPES = [(20, 30), (20, 30), (12, 3, 3, 3), (64, 200)]
RANK: dict[str, Any] = {"averager_rank": 2, "min_compression_ratio": 0.2}


def factors(device: str) -> Factors:
    gradients = [torch.empty(shape) for shape in SHAPES]
    return Factors(gradients, 2, seed=1, orthogonalise=gram_schmidt, device=torch.device(device))


def played(device: str, kept_on: str, dtype: torch.dtype) -> tuple[Factors, list[torch.Tensor]]:
    """Play rounds of unequal weights: a NaN, one taken back, one with weight 0; return all."""
    made, seen = factors(device), []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        new = [torch.randn(shape, generator=generator) for shape in SHAPES]
        if seed == 2:
            new[1][3, 4] = torch.nan
        gradients = [gradient.to(kept_on, dtype) for gradient in new]
        ps = made.begin(gradients, weight=(3, 1, 2, 0, 1, 2)[seed])
        qs = made.backproject(ps)
        ps = made.project(qs)
        qs = made.backproject(ps)
        assert all(factor.device.type == "cpu" for factor in (*ps, *qs)), "they are sent"
        for q in qs:
            q.add_(0.1)  # others' gradients are in the average
        made.commit(gradients, ps, qs)
        if seed == 4:
            made.undo()
        seen += [gradient.cpu().float() for gradient in gradients]
    return made, seen


@pytest.mark.parametrize("kept_on", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_on_a_gpu_are_those_on_the_cpu(kept_on: str, dtype: torch.dtype) -> None:
    close = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    (there, theirs), (here, ours) = played("cuda", kept_on, dtype), played("cpu", "cpu", dtype)
    assert all(owed.device.type == "cuda" for owed in there.error_feedback)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, **close)
    for one, other in zip(there.error_feedback, here.error_feedback, strict=True):
        torch.testing.assert_close(one.cpu(), other, **close)
    for one, other in zip(there.qs, here.qs, strict=True):
        torch.testing.assert_close(one, other, **close)


def test_factors_are_where_the_gradients_are() -> None:
    from rayhive.averaging.gradient_averager import RayhivePowerSGDAverager
    from rayhive.compression.powersgd.gpu_worker import ServedFactors

    parameters = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in SHAPES]

    def make(**options: Any) -> RayhivePowerSGDAverager:
        return RayhivePowerSGDAverager(**{**options, "parameters": parameters})

    averager = unstarted(make, SHAPES, **RANK)
    try:
        assert isinstance(averager.payload.factors, ServedFactors)
        with averager.get_tensors() as tensors:  # which hivemind sends, from host memory
            assert all(tensor.device.type == "cpu" for tensor in tensors)
    finally:
        averager.payload.factors.close()
    assert type(unstarted(make, SHAPES, device="cpu", **RANK).payload.factors) is Factors


def play(device: str) -> dict[str, Any]:
    """Let two peers, whose trainer uses CUDA, do rounds; return a report."""
    from rayhive.averaging.gradient_averager import RayhivePowerSGDAverager
    from tests.integration import averager_scenarios as scenes

    used = torch.ones(1000, device="cuda").sum()  # from here on, no fork can use CUDA
    report: dict[str, Any] = {"used": float(used)}
    before = torch.cuda.memory_allocated()
    found: list[list[torch.Tensor]] = []
    with scenes.swarm(2) as dhts:
        for where in (device, "cpu"):
            # without a codec, which would round the last bits
            options = {"prefix": "gpu", "device": where, "factor_codec": "none", **RANK}
            with scenes.averagers(dhts, RayhivePowerSGDAverager, **options) as group:
                results = [scenes.one_round(group) for _ in range(3)]
                report.setdefault("sizes", [len(r) for round_ in results for r in round_])
                report.setdefault("apart", scenes.spread(group))
                report.setdefault("bytes on the GPU", torch.cuda.memory_allocated() - before)
                found.append(scenes.averaged_by(group[0]))
    pairs = zip(*found, strict=True)
    report["from the CPU's"] = max(float((a - b).abs().max()) for a, b in pairs)
    return report


@pytest.mark.swarm
def test_an_averager_has_its_factors_from_the_gpu_of_its_trainer() -> None:
    output = run_module("tests.gpu.test_powersgd_gpu", "cuda:0", limit=180)
    (line,) = [line for line in output.splitlines() if line.startswith(MARK)]
    report = json.loads(line.removeprefix(MARK))
    assert report["used"] == 1000
    assert report["sizes"] == [2] * 6
    assert report["apart"] < 1e-5
    dense = 4 * sum(math.prod(shape) for shape in SWARM_SHAPES if len(shape) > 1)
    assert report["bytes on the GPU"] >= 2 * dense, "the error feedback of two peers"
    assert report["from the CPU's"] < 1e-3


if __name__ == "__main__":
    print(MARK + json.dumps(play(sys.argv[1])), flush=True)
