"""PowerSGD's factors on a GPU: the same as on the CPU, and where an averager can have them.

``python -m tests.gpu.test_powersgd_gpu DEVICE`` runs a round between two peers whose averagers
multiply there, in a process that has not used CUDA itself, and prints what was seen.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

import pytest
import torch

from rayhive.compression.orthogonalise import gram_schmidt
from rayhive.compression.powersgd_factors import Factors
from rayhive.errors import ConfigError
from tests.integration.averager_harness import MARK, run_module
from tests.unit.compression_fakes import unstarted

pytestmark = pytest.mark.gpu

SHAPES = [(20, 30), (20, 30), (12, 3, 3, 3), (64, 200)]
RANK: dict[str, Any] = {"averager_rank": 2, "min_compression_ratio": 0.2}


def factors(device: str) -> Factors:
    return Factors(SHAPES, 2, seed=1, orthogonalise=gram_schmidt, device=torch.device(device))


def played(device: str, kept_on: str, dtype: torch.dtype) -> tuple[Factors, list[torch.Tensor]]:
    """Play rounds, one with a NaN and one taken back; return the factors and all gradients."""
    made, seen = factors(device), []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        new = [torch.randn(shape, generator=generator) for shape in SHAPES]
        if seed == 2:
            new[1][3, 4] = torch.nan
        gradients = [gradient.to(kept_on, dtype) for gradient in new]
        ps = made.begin(gradients)
        qs = made.backproject(ps)
        ps = made.project(qs)
        qs = made.backproject(ps)
        assert all(factor.device.type == "cpu" for factor in (*ps, *qs)), "they are sent"
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
    assert all(owed.device.type == "cuda" for owed in there.owed)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, **close)
    for one, other in zip(there.owed, here.owed, strict=True):
        torch.testing.assert_close(one.cpu(), other, **close)
    for one, other in zip(there.qs, here.qs, strict=True):
        torch.testing.assert_close(one, other, **close)


def test_an_averager_forked_from_a_process_that_uses_cuda_is_refused_the_gpu() -> None:
    from rayhive.compression.averagers import RayhivePowerSGDAverager

    torch.zeros(1, device="cuda")
    with pytest.raises(ConfigError, match="forks then cannot"):
        unstarted(RayhivePowerSGDAverager, SHAPES, device="cuda", **RANK)
    # Without it, gradients of a GPU are averaged, and factorised, in host memory.
    parameters = [torch.nn.Parameter(torch.zeros(shape, device="cuda")) for shape in SHAPES]
    averager = unstarted(
        lambda **options: RayhivePowerSGDAverager(**{**options, "parameters": parameters}),
        SHAPES,
        **RANK,
    )
    with averager.get_tensors() as tensors:
        assert all(tensor.device.type == "cpu" for tensor in tensors)


def open_devices(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    found = set()
    for name in os.listdir(folder):
        with suppress(OSError):
            found.add(os.readlink(f"{folder}/{name}"))
    return sorted(path for path in found if path.startswith("/dev/nvidia"))


def play(device: str) -> dict[str, Any]:
    from rayhive.compression.averagers import RayhivePowerSGDAverager
    from tests.integration import averager_scenarios as scenes

    options = {"prefix": "gpu", "device": device, **RANK}
    with (
        scenes.swarm(2) as dhts,
        scenes.averagers(dhts, RayhivePowerSGDAverager, **options) as group,
    ):
        results = [scenes.one_round(group) for _ in range(2)]
        return {
            "sizes": [len(result) for round_ in results for result in round_],
            "apart": scenes.spread(group),
            "averagers": [open_devices(averager.pid) for averager in group],
            "trainer": open_devices(os.getpid()),
            "used here": torch.cuda.is_initialized(),
        }


@pytest.mark.swarm
def test_an_averager_multiplies_on_the_gpu_if_its_trainer_does_not_use_it() -> None:
    output = run_module("tests.gpu.test_powersgd_gpu", "cuda", limit=180)
    (line,) = [line for line in output.splitlines() if line.startswith(MARK)]
    told = json.loads(line.removeprefix(MARK))
    assert told["sizes"] == [2, 2, 2, 2]
    assert told["apart"] < 1e-5
    assert all("/dev/nvidia-uvm" in devices for devices in told["averagers"])
    assert "/dev/nvidia-uvm" not in told["trainer"] and not told["used here"]


if __name__ == "__main__":
    print(MARK + json.dumps(play(sys.argv[1])), flush=True)
