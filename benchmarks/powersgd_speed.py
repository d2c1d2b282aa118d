"""Duration of PowerSGD's arithmetic in a round, compared with hivemind's in the same run.

Claim: for the gradients of ResNet-18 (CIFAR-10, 11.2 million parameters) at rank 4 and on one
thread, compressing and decompressing takes at most half of hivemind's time. Both are bound by
memory, so the ratio depends on the machine, and on numba: see "Time" in docs/compression.md.

Both averagers run their rounds as in a swarm, but alone and with all-reduces that do nothing. The
remaining work is projecting, orthonormalising, projecting back, multiplying and committing. They
alternate, round by round. Before each round other gradients are copied once, so that the caches are
full of other data, as after a training step; the time of the copy shows the speed of the memory.
CPU time is printed as well, for machines with other load.
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

from benchmarks.claims import Claim, print_claims
from benchmarks.ratios import paired_ratio
from benchmarks.swarm import conditions
from rayhive.averaging.payload_policy import GroupRound
from rayhive.averaging.powersgd_payload import PowerSGDOptions, PowerSGDPayload
from rayhive.registry import WORKLOADS

MODEL, RANK = "resnet18_cifar10", 4


class Ours:
    """Rayhive's payload policy, in whose all-reduces no other peer takes part."""

    def __init__(self, shapes: list[tuple[int, ...]], rank: int) -> None:
        self.gradients = [torch.randn(shape) for shape in shapes]
        self.payload = PowerSGDPayload(
            self.gradients, PowerSGDOptions(rank), seed="speed", device=torch.device("cpu")
        )

    async def run_round(self) -> None:
        """Do the arithmetic of one round."""
        await self.payload.average(self.gradients, GroupRound(self._allreduce, {"own": 1}))

    async def _allreduce(self, *_: Any) -> float:
        return 1.0


class Theirs(PowerSGDGradientAverager):
    """hivemind's averager, in whose all-reduces no other peer takes part."""

    def __init__(self, shapes: list[tuple[int, ...]], rank: int) -> None:
        super().__init__(
            parameters=[torch.nn.Parameter(torch.zeros(shape)) for shape in shapes],
            averager_rank=rank,
            prefix="speed",
            dht=SimpleNamespace(client_mode=False, peer_id=PeerID(b"the peer itself")),
            start=False,
        )
        with self.get_tensors() as gradients:
            for gradient in gradients:
                gradient.normal_()
        dumps = MSGPackSerializer.dumps
        self._group = GroupInfo(b"group", (b"me",), (dumps([None, 0, dumps(1)]),))

    async def run_round(self) -> None:
        """Do the arithmetic of one round."""
        await self._aggregate_with_group(self._group, min_vector_size=0)

    async def _run_allreduce_inplace_(self, *_: Any, **__: Any) -> None:
        return None


class Copy:
    """Round that only copies gradients of the same size."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.old, self.new = ([torch.ones(shape) for shape in shapes] for _ in range(2))

    async def run_round(self) -> None:
        """Copy."""
        for old, new in zip(self.old, self.new, strict=True):
            new.copy_(old)


async def measure(averagers: list[Any], rounds: int, warm_up: int = 3) -> np.ndarray:
    """Return the milliseconds by clock (wall, processor), averager and round."""
    clocks = (time.perf_counter, time.process_time)
    took = np.empty((len(clocks), len(averagers), warm_up + rounds))
    for number in range(warm_up + rounds):
        for which, averager in enumerate(averagers):
            began = [clock() for clock in clocks]
            await averager.run_round()
            took[:, which, number] = [clock() - b for clock, b in zip(clocks, began, strict=True)]
    return 1e3 * took[:, :, warm_up:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--rank", type=int, default=RANK)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shapes = [tuple(shape) for shape in WORKLOADS.get(MODEL)().parameter_shapes()]
    copy = Copy(shapes)
    torch.manual_seed(0)
    theirs, ours = Theirs(shapes, arguments.rank), Ours(shapes, arguments.rank)
    took = asyncio.run(measure([copy, theirs, copy, ours], arguments.rounds))
    elements = sum(int(np.prod(shape)) for shape in shapes)
    print(f"{MODEL}: {elements:,} gradients, rank {arguments.rank}, 1 thread, {conditions()}")
    for clock, (_, theirs, copied, ours) in zip(("wall", "processor"), took, strict=True):
        for name, values in (("a copy", copied), ("hivemind", theirs), ("rayhive", ours)):
            p5, p50, p95 = np.percentile(values, [5, 50, 95])
            print(
                f"{clock} {name}: p50 {p50:.1f} ms   (p5 {p5:.1f}, p95 {p95:.1f}, n {len(values)})"
            )
        print(f"{clock} rayhive over copy {paired_ratio(ours, copied)}")
        print(f"{clock} hivemind over rayhive {paired_ratio(theirs, ours)}")
    _, theirs, _, ours = took[1]
    text = f"PowerSGD's arithmetic, rank {arguments.rank}, {MODEL}: hivemind over rayhive"
    print_claims(Claim(text, *paired_ratio(theirs, ours), unit="x", bound=2.0, at_least=True))


if __name__ == "__main__":
    main()
