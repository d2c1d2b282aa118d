"""Copies between a GPU and the memory of averaged gradients, with and without locked pages.

Claim: with locked pages, 400 MB in 100 tensors take at most half the time, to the GPU and from it.

The tensors are those of a gradient averager: in shared memory, written before.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.ratios import Ratio, ratio
from benchmarks.swarm import conditions
from rayhive.averaging.gradient_averager import shared_zeros
from rayhive.averaging.page_locks import PageLocks

TENSORS, ELEMENTS = 100, 1_000_000
REPEATS = 15
#: Largest ratio of the times that is claimed.
BOUND = 0.5


def seconds(copy: Callable[[], None]) -> list[float]:
    """Return the durations of a copy, after one that does not count [s]."""
    found: list[float] = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found[1:]


def copy_all(into: list[torch.Tensor], of: list[torch.Tensor]) -> Callable[[], None]:
    """Return a copy of all tensors, one after the other."""

    def copy() -> None:
        for one, other in zip(into, of, strict=True):
            one.copy_(other, non_blocking=True)

    return copy


def main() -> None:
    """Measure and print."""
    if not torch.cuda.is_available():
        print("skipped: no GPU")
        return
    there = [torch.randn(ELEMENTS, device="cuda") for _ in range(TENSORS)]
    here = shared_zeros(there)
    ways = {"from the GPU": copy_all(here, there), "to the GPU": copy_all(there, here)}
    print(f"{TENSORS} x {ELEMENTS:,} floats, {torch.cuda.get_device_name()}, {conditions()}")
    pageable = {way: seconds(copy) for way, copy in ways.items()}
    locks = PageLocks(here)
    locked = {way: seconds(copy) for way, copy in ways.items()}
    locks.close()
    made: list[Claim] = []
    for way in ways:
        over: Ratio = ratio(locked[way], pageable[way])
        medians = [sorted(each[way])[REPEATS // 2] * 1e3 for each in (pageable, locked)]
        print(f"{way}: {medians[0]:.1f} ms, with locked pages {medians[1]:.1f} ms")
        text = f"{way}: time with locked pages over that without"
        made.append(Claim(text, *over, "x", BOUND, at_least=False))
    print_claims(*made)


if __name__ == "__main__":
    main()
