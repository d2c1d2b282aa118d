"""How long PowerSGD's arithmetic of a round takes, against hivemind's own in the same run.

Claim: for the gradients of ResNet-18 (CIFAR-10, 11.2 million parameters) at rank 4 and on one
thread, compressing and decompressing takes at most half of hivemind's time.

Both averagers run their rounds as in a swarm, but alone and with all-reduces that do nothing:
what is left is projecting, orthonormalising, projecting back, multiplying and committing. They
alternate, in blocks whose first round is not counted: it finds the other's data in the caches.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

sys.path.insert(0, __file__.rsplit("/", 2)[0])

import rayhive.workloads  # noqa: F401 - registers them
from benchmarks.swarm import conditions
from rayhive.compression.powersgd import TransactionalPowerSGD
from rayhive.registry import WORKLOADS

MODEL, RANK = "resnet18_cifar10", 4


class Alone:
    """An averager in whose all-reduces nobody else takes part."""

    async def _run_allreduce_inplace_(self, *_: Any, **__: Any) -> None:
        return None


class Ours(Alone, TransactionalPowerSGD):
    """Rayhive's."""


class Theirs(Alone, PowerSGDGradientAverager):
    """hivemind's."""


def make(kind: Any, shapes: list[tuple[int, ...]], rank: int) -> Any:
    """Return an averager without a process, with random gradients."""
    torch.manual_seed(0)
    averager = kind(
        parameters=[torch.nn.Parameter(torch.zeros(shape)) for shape in shapes],
        averager_rank=rank,
        prefix="speed",
        dht=SimpleNamespace(client_mode=False, peer_id=PeerID(b"the peer itself")),
        start=False,
    )
    with averager.get_tensors() as gradients:
        for gradient in gradients:
            gradient.normal_()
    return averager


async def measure(averagers: list[Any], blocks: int, rounds: int) -> np.ndarray:
    """Return seconds by averager, block and round."""
    dumps = MSGPackSerializer.dumps
    group = GroupInfo(b"group", (b"me",), (dumps([None, 0, dumps(1)]),))
    seconds = np.empty((len(averagers), blocks, rounds))
    for block in range(blocks):
        for which, averager in enumerate(averagers):
            for number in range(-1, rounds):
                began = time.perf_counter()
                await averager._aggregate_with_group(group, min_vector_size=0)
                if number >= 0:
                    seconds[which, block, number] = time.perf_counter() - began
    return seconds


def ratio_interval(theirs: np.ndarray, ours: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the ratio of medians, drawing whole blocks."""
    generator = np.random.default_rng(0)
    ratios = []
    for _ in range(draws):
        blocks = generator.integers(0, len(ours), len(ours))
        ratios.append(np.median(theirs[blocks]) / np.median(ours[blocks]))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of a block")
    parser.add_argument("--rank", type=int, default=RANK)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [tuple(shape) for shape in WORKLOADS.get(MODEL)().parameter_shapes()]
    averagers = [make(kind, shapes, arguments.rank) for kind in (Theirs, Ours)]
    seconds = asyncio.run(measure(averagers, arguments.blocks, arguments.rounds))
    elements = sum(int(np.prod(shape)) for shape in shapes)
    print(f"{MODEL}: {elements:,} gradients, rank {arguments.rank}, 1 thread, {conditions()}")
    for name, values in zip(("hivemind", "rayhive"), 1e3 * seconds, strict=True):
        p5, p50, p95 = np.percentile(values, [5, 50, 95])
        print(f"{name:>9}: p50 {p50:.1f} ms   (p5 {p5:.1f}, p95 {p95:.1f}, n {values.size})")
    theirs, ours = seconds
    low, high = ratio_interval(theirs, ours)
    ratio = np.median(theirs) / np.median(ours)
    print(f"ratio of medians {ratio:.2f}x, 95 % interval {low:.2f}-{high:.2f}")


if __name__ == "__main__":
    main()
