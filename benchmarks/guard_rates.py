"""What the guard of the averagers sees in honest training, and which corrupt gradients it tells.

Usage: ``python benchmarks/guard_rates.py [--rounds N]``. No network: in each round, four peers
compute gradients of the same parameters on data of their own, which are judged as in a group and
then averaged. Honest gradients must never be refused; a peer's gradient is then replaced in turn
by a corrupt one, and judged again among the same others.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import deque
from collections.abc import Iterator
from statistics import fmean, median, median_low, quantiles

import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import print_fact
from rayhive.compression.guard import (
    LEANING,
    NORM_FACTOR,
    REMEMBERED,
    Announcement,
    directions,
    judge,
    norm_of,
)
from rayhive.compression.sketching import Sketcher
from rayhive.workloads.loading import load_workload

PEERS, AGE = 4, 5
#: Workload, its arguments, samples of a peer in a round, rounds if not said otherwise.
CASES = (
    ("digits", {}, 16, 300),
    ("digits", {}, 64, 300),
    ("source_lm", {}, 8, 60),
)
Gradient = list[torch.Tensor]


class Swarm:
    """Peers in one process that always have the same parameters."""

    def __init__(self, name: str, args: dict[str, object], batch: int, seed: int = 0) -> None:
        workload = load_workload(name, None, args)
        self.module = workload.module(seed)
        configured = self.module.configure_optimizers()
        self.optimizer = configured[0][0] if isinstance(configured, tuple) else configured
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.data = [
            _forever(workload.train_loader(peer=peer, peers=PEERS, batch_size=batch, seed=seed))
            for peer in range(PEERS)
        ]

    def gradients(self) -> list[Gradient]:
        """Return every peer's gradient."""
        found = []
        for data in self.data:
            self.module.zero_grad()
            loss = self.module.training_step(next(data), 0)
            (loss["loss"] if isinstance(loss, dict) else loss).backward()
            found.append([p.grad.detach().clone() for p in self.parameters])
        return found

    def step(self, gradients: list[Gradient]) -> None:
        """Step with the mean of gradients."""
        for parameter, *each in zip(self.parameters, *gradients, strict=True):
            parameter.grad = torch.stack(each).mean(0)
        self.optimizer.step()


def _forever(loader: object) -> Iterator[object]:
    while True:
        yield from loader  # type: ignore[misc]


def measure(name: str, args: dict[str, object], batch: int, rounds: int) -> None:
    """Train for some rounds and print what the guard saw."""
    torch.manual_seed(0)
    swarm = Swarm(name, args, batch)
    sketcher = Sketcher([p.numel() for p in swarm.parameters])
    usual: deque[float] = deque(maxlen=REMEMBERED)
    past: deque[Gradient] = deque(maxlen=AGE)

    def announced(gradient: Gradient) -> Announcement:
        norm = norm_of(gradient)
        memory = float(median(usual)) if usual else None
        sketch = (sketcher(gradient) / norm).half().numpy().tobytes() if norm > 0 else b""
        return Announcement(norm, memory, sketch)

    ratios: list[float] = []
    seen: dict[str, list[float]] = {"honest": [], "flipped": [], "stale": []}
    refused = {"honest": 0, "NaN": 0, "x1000": 0, "flipped": 0, "stale": 0}
    tried = dict.fromkeys(refused, 0)
    for _ in range(rounds):
        gradients = swarm.gradients()
        swarm.step(gradients)
        said = dict(enumerate(map(announced, gradients)))
        norms = [a.norm for a in said.values()]
        ratios.append(max(norms) / max(median_low(norms), median(usual) if usual else 0.0))
        seen["honest"] += directions(said).values()
        tried["honest"] += PEERS
        refused["honest"] += len(judge(said))
        corrupt = {
            "NaN": [torch.full_like(g, math.nan) for g in gradients[0]],
            "x1000": [g * 1000 for g in gradients[0]],
            "flipped": [-g for g in gradients[0]],
        }
        if len(past) == AGE:
            corrupt["stale"] = past[0]
        for kind, gradient in corrupt.items():
            told = {**said, 0: announced(gradient) if kind != "NaN" else Announcement(math.nan)}
            tried[kind] += 1
            verdict = judge(told)
            refused[kind] += set(verdict) == {0}
            refused["honest"] += len(verdict.keys() - {0})
            if kind in seen:
                seen[kind].append(directions(told)[0])
        past.append(gradients[0])
        usual.append(median_low(norms))

    print(f"\n{name}, {PEERS} peers, {batch} samples each, {rounds} rounds")
    print(f"  largest norm over the usual one: at most {max(ratios):.1f}, in the median "
          f"{median(ratios):.2f} (refused from {NORM_FACTOR:g} on)")  # fmt: skip
    for kind, values in seen.items():
        cuts = quantiles(values, n=100)
        print(f"  cosine with the others, {kind:8}: 1 % {cuts[0]:+.2f}, median {cuts[49]:+.2f}, "
              f"99 % {cuts[98]:+.2f}, least {min(values):+.2f}")  # fmt: skip
    for kind in refused:
        print(f"  refused: {kind:8} {refused[kind]} of {tried[kind]}")
    for threshold in (-0.2, -0.3, -0.4, -0.5):
        shares = {k: sum(v < threshold for v in vs) / len(vs) for k, vs in seen.items()}
        told_shares = ", ".join(f"{k} {share:.1%}" for k, share in shares.items())
        print(f"  below a cosine of {threshold:+.1f}: {told_shares}")
    where = f"{name}, {batch} samples"
    print_fact(f"{where}: no honest gradient is refused", refused["honest"] == 0)
    print_fact(f"{where}: every gradient that is NaN is refused", refused["NaN"] == tried["NaN"])
    # one that is not refused was a twentieth of the usual one before, or less
    share = refused["x1000"] / tried["x1000"]
    print_fact(f"{where}: of those times 1000, 95 % or more are refused", share >= 0.95)


def follow_a_flipper(
    name: str, args: dict[str, object], batch: int, rounds: int, flips: bool, seed: int
) -> tuple[int | None, int, int]:
    """Train with one peer whose gradients are flipped, or with none.

    Returns:
        The rounds until it was refused, how many of its gradients were averaged all the same, and
        how many honest ones were refused.
    """
    torch.manual_seed(seed)
    swarm = Swarm(name, args, batch, seed)
    sketcher = Sketcher([p.numel() for p in swarm.parameters])
    leans: list[deque[float]] = [deque(maxlen=LEANING) for _ in range(PEERS)]
    first, averaged, honest = None, 0, 0
    for number in range(rounds):
        gradients = swarm.gradients()
        if flips:
            gradients[0] = [-g for g in gradients[0]]
        said = {}
        for peer, gradient in enumerate(gradients):
            norm = norm_of(gradient)
            lean = fmean(leans[peer]) if len(leans[peer]) == LEANING else None
            sketch = (sketcher(gradient) / norm).half().numpy().tobytes()
            said[peer] = Announcement(norm, None, sketch, lean)
        for peer, value in directions(said).items():
            leans[peer].append(value)
        refused = judge(said)
        honest += len(refused.keys() - ({0} if flips else set()))
        if 0 in refused and first is None:
            first = number + 1
        averaged += 0 not in refused
        swarm.step([g for peer, g in enumerate(gradients) if peer not in refused])
    return first, averaged, honest


def measure_direction(name: str, args: dict[str, object], batch: int, rounds: int) -> None:
    """Print how long a peer whose gradients are all flipped stays, and who is mistaken for one."""
    seeds = range(3)
    cases = {
        flips: [follow_a_flipper(name, args, batch, rounds, flips, seed) for seed in seeds]
        for flips in (False, True)
    }
    where = f"{name}, {batch} samples"
    print(f"\n{where}, one peer of {PEERS} flipped in all of {rounds} rounds, seeds {list(seeds)}")
    for first, averaged, honest in cases[True]:
        print(f"  refused from round {first} on, {averaged} of {rounds} were averaged; "
              f"{honest} honest gradients refused")  # fmt: skip
    print(f"  without it: {[honest for *_, honest in cases[False]]} honest gradients refused")
    mistaken = sum(honest for runs in cases.values() for *_, honest in runs)
    print_fact(f"{where}: no honest gradient is taken for a flipped one", mistaken == 0)
    caught = all(first is not None for first, *_ in cases[True])
    print_fact(f"{where}: a peer that flips all its gradients is found", caught)


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name, args, batch, rounds in CASES:
        measure(name, dict(args), batch, asked.rounds or rounds)
        measure_direction(name, dict(args), batch, asked.rounds or rounds)


if __name__ == "__main__":
    main()
