"""Time and bytes to the same held-out loss: local steps and sparse rounds, and DDP with PowerSGD.

Claims, for 4 peers at 20 Mbit/s and a round trip of 80 ms: some configuration of local steps sends
at least 10 times fewer bytes by sample than torch's DDP with PowerSGD of rank 4, at a final loss
that is not separable from DDP's, and one reaches the target at least 3 times sooner.

All variants train the same perceptron of 0.75 million parameters on the digits of scikit-learn, a
fifth of which is held out; each peer has its own part of the rest. A batch is one optimizer step: a
global one with DDP and with rounds of gradients, a peer's own between two rounds of local steps.
One peer's computation of a batch is a wait of 0.1 s, as in ``against_ddp.py``. Every variant trains
on the same number of samples, and evaluates after each round, or after as many samples as a round
of local steps has. A seed is one turn of each variant, in fresh processes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.both_sides import PARAMETERS, RANK, joined, make_module
from benchmarks.claims import Claim, print_claims, print_fact
from benchmarks.ddp_side import hooked
from benchmarks.ratios import Ratio, paired_ratio
from benchmarks.shaped_peers import Seat, nodes, skipped, wire
from benchmarks.swarm import conditions

#: Time limit under ``make bench`` [s].
LIMIT_S = 5400
PEERS, RATE_MBIT, RTT_MS, BATCH, COMPUTE_S = 4, 20.0, 80.0, 32, 0.1
#: Batches of a peer in a round of local steps, and in a turn.
LOCAL, BATCHES = 8, 192
#: Held-out loss that counts as reached.
TARGET = 0.25
RIVAL = "DDP PowerSGD"

#: DDP's communication hook by the name of the variant.
DDP = {"DDP fp16": "fp16", RIVAL: "powersgd"}
PLAIN = {"local_steps": LOCAL, "outer_lr": 1.0, "outer_momentum": 0.0}
FAST = {**PLAIN, "outer_momentum": 0.5}  # overshoots with top-k
#: Configuration of rayhive's variants.
OURS: dict[str, dict[str, Any]] = {
    "PowerSGD": {"powersgd_rank": RANK},
    "local steps, PowerSGD": {**FAST, "powersgd_rank": RANK},
    "local steps, sign": {**FAST, "codec": "sign", "error_feedback": True},
    "24 local steps, blockwise2": {
        **PLAIN, "local_steps": 24, "codec": "blockwise2", "error_feedback": True,
    },
    "local steps, topk": {**PLAIN, "codec": "topk", "error_feedback": True},
    "4 fragments, sign": {**FAST, "fragments": 4, "codec": "sign", "error_feedback": True},
    "4 fragments, topk, delayed": {
        **PLAIN, "fragments": 4, "codec": "topk", "error_feedback": True, "delay": "gradients",
    },
}  # fmt: skip


@dataclass
class Curve:
    """Progress of one peer in a turn.

    Attributes:
        began: Time and bytes at the start of training.
        points: Time since then [s], batches and held-out loss.
        sent: Bytes that the peer sent in all.
    """

    began: tuple[float, int] = (0.0, 0)
    points: list[tuple[float, int, float]] = field(default_factory=list)
    sent: int = 0

    def begin(self) -> None:
        self.began = (time.perf_counter(), wire().sent)

    def note(self, batches: int, loss: float) -> None:
        self.points.append((time.perf_counter() - self.began[0], batches, loss))
        self.sent = wire().sent - self.began[1]


def part_of(index: int, seed: int) -> tuple[Any, Any, Any, Any]:
    """Return a peer's training data and labels, and those that are held out."""
    import torch
    from sklearn.datasets import load_digits

    data, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    held, rest = np.split(order, [len(order) // 5])
    own = rest[index::PEERS]
    tensors = (data[own] / 16.0, labels[own], data[held] / 16.0, labels[held])
    x, y, x_held, y_held = map(torch.as_tensor, tensors)
    return x.float(), y.long(), x_held.float(), y_held.long()


class Task:
    """The module and the data of one peer.

    Args:
        index: Number of the peer.
        seed: Seed of the data, of their order and of the parameters.
    """

    def __init__(self, index: int, seed: int) -> None:
        import torch

        self.x, self.y, *self.held = part_of(index, seed)
        self.module = make_module(COMPUTE_S, seed)
        self._generator = torch.Generator().manual_seed(1000 * seed + index)

    def batch(self) -> tuple[Any, Any]:
        import torch

        drawn = torch.randint(len(self.y), (BATCH,), generator=self._generator)
        return self.x[drawn], self.y[drawn]

    def loss(self) -> float:
        """Return the loss on the held-out data, without the module's wait."""
        import torch

        data = self.held[0]
        with torch.no_grad():
            for layer in self.module:
                data = layer(data)
            return float(torch.nn.functional.cross_entropy(data, self.held[1]))


def run_ddp(seat: Seat, settings: dict[str, Any]) -> Curve:
    """Train one rank of DDP."""
    import torch
    import torch.distributed as dist

    task, curve = Task(seat.index, settings["seed"]), Curve()
    module = hooked(seat, task.module, settings["hook"])
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    dist.barrier()
    curve.begin()
    for number in range(1, BATCHES + 1):
        x, y = task.batch()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % LOCAL == 0:
            curve.note(number, task.loss())
    dist.barrier()
    return curve


def run_rayhive(seat: Seat, settings: dict[str, Any]) -> Curve:
    """Train one peer with the arguments of a study."""
    import torch
    from lightning.pytorch import Callback, LightningModule

    from rayhive.optim.local_steps import with_common_parameters

    task, curve = Task(seat.index, settings["seed"]), Curve()
    configuration = settings["configuration"]
    of_round = configuration.get("local_steps", 1) / configuration.get("fragments", 1)
    rounds = round(BATCHES / of_round)
    every = max(1, round(LOCAL / of_round))

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = task.module

        def training_step(self, batch: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    class Batches:
        def __iter__(self) -> Any:
            return (task.batch() for _ in itertools.count())

    class Rounds(Callback):
        seen = 0

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.catch_up()
            assert trainer.strategy.optimizer.tracker.wait_for_peers(PEERS, 60)
            curve.begin()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            optimizer = trainer.strategy.optimizer
            before, self.seen = self.seen, optimizer.local_epoch
            if self.seen // every > before // every:
                with with_common_parameters(optimizer):
                    curve.note(round(self.seen * of_round), task.loss())
            trainer.should_stop = trainer.should_stop or self.seen >= rounds

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.strategy.optimizer.settle()

    joined(seat, configuration, BATCH * PEERS, BATCH, Module(), Batches(), Rounds())
    return curve


@dataclass
class Turn:
    """Result of one variant with one seed.

    Attributes:
        seconds: Time to the target, a mean over the peers [s]; infinite if it was not reached.
        trained_s: Time of all batches [s].
        loss: Loss at the end, a mean over the peers.
        by_sample: Bytes that all peers sent, by sample [B].
    """

    seconds: float
    trained_s: float
    loss: float
    by_sample: float

    @classmethod
    def of(cls, curves: list[Curve]) -> Turn:
        """Return the result of the peers of a turn."""
        reached = [
            next((at for at, _, loss in curve.points if loss <= TARGET), np.inf) for curve in curves
        ]
        ends = [curve.points[-1] for curve in curves]
        samples = BATCH * sum(batches for _, batches, _ in ends)
        return cls(
            seconds=float(np.mean(reached)),
            trained_s=float(np.mean([at for at, _, _ in ends])),
            loss=float(np.mean([loss for *_, loss in ends])),
            by_sample=sum(curve.sent for curve in curves) / samples,
        )


def measure(variants: list[str], seeds: range) -> dict[str, list[Turn]]:
    """Run all variants with each seed, print a table, and return the results."""
    found: dict[str, list[Turn]] = {name: [] for name in variants}
    with nodes(PEERS, RATE_MBIT, RTT_MS) as on:
        print(f"\nmeasured {on.rate_mbit:.1f} Mbit/s, {on.rtt_ms:.1f} ms", flush=True)
        for seed in seeds:
            for name in reversed(variants) if seed % 2 else variants:
                if name in DDP:
                    curves = on.run(run_ddp, {"seed": seed, "hook": DDP[name]}, timeout=600)
                else:
                    settings = {"seed": seed, "configuration": OURS[name]}
                    curves = on.run(run_rayhive, settings, timeout=600)
                found[name].append(Turn.of(curves))
                print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
    print(f"\n| variant | s to a loss of {TARGET} | s in all | final loss | bytes by sample |")
    print("|---|--:|--:|--:|--:|")
    for name, turns in found.items():
        columns = [
            f"{np.median([turn.seconds for turn in turns]):.1f}",
            f"{np.median([turn.trained_s for turn in turns]):.1f}",
            f"{np.mean([turn.loss for turn in turns]):.3f}",
            f"{np.mean([turn.by_sample for turn in turns]):.1f}",
        ]
        print(f"| {' | '.join([name, *columns])} |", flush=True)
    return found


def excess(values: np.ndarray) -> tuple[float, float]:
    """Return the mean of paired differences and the lower end of its 95 % interval."""
    mean, n = float(values.mean()), len(values)
    if n < 2:
        return mean, mean
    half = float(stats.t.ppf(0.975, n - 1) * values.std(ddof=1) / np.sqrt(n))
    return mean, mean - half


def conclude(found: dict[str, list[Turn]]) -> None:
    """Print the claims, about the variants whose loss is not separable from DDP's."""

    def values(name: str, attribute: str) -> np.ndarray:
        return np.asarray([getattr(turn, attribute) for turn in found[name]])

    def above(name: str) -> tuple[float, float]:
        return excess(values(name, "loss") - values(RIVAL, "loss"))

    def interval(difference: tuple[float, float]) -> str:
        mean, low = difference
        return f"{mean:+.3f} ± {mean - low:.3f}"

    local = [name for name in found if "local_steps" in OURS.get(name, {})]
    if not local:
        return
    best = min(local, key=above)
    good = [name for name in local if above(name)[1] <= 0.0]
    text = (
        f"the final loss of {best} is not separable from that of {RIVAL} ({interval(above(best))})"
    )
    print_fact(text, best in good)
    least = min(good or local, key=lambda name: values(name, "by_sample").mean())
    first = min(good or local, key=lambda name: float(np.median(values(name, "seconds"))))
    fewer: Ratio = paired_ratio(values(RIVAL, "by_sample"), values(least, "by_sample"))
    sooner: Ratio = paired_ratio(values(RIVAL, "seconds"), values(first, "seconds"))
    print_claims(
        Claim(f"bytes by sample, {RIVAL} over {least}", *fewer, "x", 10.0, at_least=True),
        Claim(f"time to target, {RIVAL} over {first}", *sooner, "x", 3.0, at_least=True),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--first-seed", type=int, default=0, help="the others follow it")
    parser.add_argument(
        "--only", nargs="+", metavar="VARIANT", choices=[*DDP, *OURS], help="default: all"
    )
    arguments = parser.parse_args()
    if skipped():
        return
    print(f"{PARAMETERS:,} parameters, {PEERS} peers; {conditions()}")
    variants = [name for name in (*DDP, *OURS) if name in (arguments.only or (*DDP, *OURS))]
    first = arguments.first_seed
    found = measure(variants, range(first, first + arguments.seeds))
    if RIVAL in found:
        print()
        conclude(found)


if __name__ == "__main__":
    main()
