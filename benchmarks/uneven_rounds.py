"""Convergence of PowerSGD in a swarm of two peers of unequal speed and unequal data.

Claim: after 400 rounds with rank 4, the distance to the solution is at most 1.5 times that of
peers that average their gradients as they are.

Both peers learn a linear map. Their data belong to maps at a distance of 0.3 on either side of the
true one. One peer computes about three times as fast as the other, with jitter, so the samples per
round differ between peers and between rounds. The solution is the minimum over all samples that
entered a round. Swarms of real peers with and without PowerSGD alternate; the distance is measured
in the last rounds of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.ratios import ratio
from benchmarks.swarm import conditions, join_swarm, run_swarm

SHAPE, SHIFT, NOISE, RATE = (20, 24), 0.3, 0.1, 0.05
BATCH, TARGET, RANK = 4, 64, 4
#: Mean time of each peer for a batch [s].
PACE_S = (0.002, 0.006)
#: Number of last rounds in which the distance is measured, and rounds after which it is printed.
LAST, SHOWN = 40, (50, 100, 200, 400)


def maps() -> list[torch.Tensor]:
    """Return the maps of the two peers' data."""
    generator = torch.Generator().manual_seed(1)
    true, shift = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    return [true + SHIFT * shift, true - SHIFT * shift]


def run_peer(index: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer; return its samples in every round, and its weights in measured rounds."""
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

    from rayhive.optim.optimizer import RayhiveOptimizer

    torch.set_num_threads(1)
    dht = join_swarm(settings["initial_peers"])
    module = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    torch.nn.init.zeros_(module.weight)
    rounds: list[dict[str, Any]] = []

    def note(kind: str, fields: dict[str, Any]) -> None:
        if kind == "round":
            rounds.append({name: fields[name] for name in ("round", "samples", "outcome")})

    averager = partial(
        PowerSGDGradientAverager, averager_rank=settings["rank"], min_compression_ratio=0.0
    )
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="uneven",
        target_batch_size=TARGET,
        batch_size_per_step=BATCH,
        optimizer=torch.optim.SGD(module.parameters(), lr=RATE),
        grad_averager_factory=averager if settings["rank"] else None,
        matchmaking_time=5.0,
        averaging_timeout=30.0,
        delay_state_averaging=False,
        on_event=note,
    )
    own = maps()[index]
    generator = torch.Generator().manual_seed(100 * settings["seed"] + index)
    random = np.random.default_rng(100 * settings["seed"] + index)
    kept: dict[int, list[float]] = {}
    wanted = {*SHOWN, *range(settings["rounds"] - LAST + 1, settings["rounds"] + 1)}
    started = False
    while optimizer.local_epoch < settings["rounds"]:
        inputs = torch.randn(BATCH, SHAPE[1], generator=generator)
        targets = inputs @ own.T + NOISE * torch.randn(BATCH, SHAPE[0], generator=generator)
        optimizer.zero_grad()
        (0.5 * (module(inputs) - targets).square().sum() / BATCH).backward()
        time.sleep(random.exponential(PACE_S[index]))
        before = optimizer.local_epoch
        optimizer.step()
        if not started:
            assert optimizer.tracker.wait_for_peers(settings["peers"], 30)
            started = True
        if optimizer.local_epoch != before and optimizer.local_epoch in wanted:
            kept[optimizer.local_epoch] = module.weight.detach().flatten().tolist()
    optimizer.shutdown()
    dht.shutdown()
    return {"rounds": rounds, "weights": kept}


def measure(rank: int | None, rounds: int, seed: int) -> dict[int, float]:
    """Return a fresh swarm's relative distances to the solution by round; print a line."""
    settings = {"rank": rank, "rounds": rounds, "seed": seed}
    results = run_swarm(__file__, 2, settings, timeout=600)
    samples = np.array([sum(r["samples"] for r in result["rounds"]) for result in results])
    shares = [
        one["samples"] / (one["samples"] + other["samples"])
        for one, other in zip(*(result["rounds"] for result in results), strict=False)
        if one["samples"] + other["samples"]
    ]
    outcomes = [r["outcome"] for result in results for r in result["rounds"]]
    solution = torch.tensordot(
        torch.tensor(samples / samples.sum()).float(), torch.stack(maps()), 1
    )
    distances = {
        int(number): float((torch.tensor(weights).view(SHAPE) - solution).norm() / solution.norm())
        for number, weights in results[0]["weights"].items()
    }
    low, mid, high = np.percentile(shares, [5, 50, 95])
    shown = "/".join(f"{distances[number]:.3f}" for number in SHOWN if number in distances)
    print(
        f"{'dense' if rank is None else f'rank {rank}'}, swarm {seed}: distance {shown}, share of"
        f" the fast peer {mid:.2f} ({low:.2f}-{high:.2f}), averaged"
        f" {outcomes.count('averaged')} of {len(outcomes)}",
        flush=True,
    )
    return distances


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.peer is not None:
        print(json.dumps(run_peer(arguments.peer, json.loads(sys.stdin.readline()))), flush=True)
        return
    print(f"rounds {', '.join(map(str, SHOWN))} of {arguments.rounds}, {conditions()}", flush=True)
    last: dict[int | None, list[float]] = {None: [], RANK: []}
    for seed in range(arguments.repeats):
        for rank, values in last.items():
            distances = measure(rank, arguments.rounds, seed)
            values.extend(d for number, d in distances.items() if number > arguments.rounds - LAST)
    print_claims(
        Claim(
            f"2 uneven peers, distance after {arguments.rounds} rounds, rank {RANK} over dense",
            *ratio(last[RANK], last[None]),
            unit="x",
            bound=1.5,
            at_least=False,
        )
    )


if __name__ == "__main__":
    main()
