"""Rounds of rayhive and of torch's DDP over gloo, with the options that a user gets by default.

Claims, for 4 peers at 20 Mbit/s and a round trip of 1 ms: with the same codec, a round takes at
most 1.1 times as long as DDP's (fp32, fp16 hook), with PowerSGD at most 1.0 times as long; uniform8
is at least 3 times as fast as DDP with fp32; and ``delay: gradients`` is faster than DDP with the
same codec when communication takes about as long as computation.

Both train the same module of 0.75 million parameters on the same links. One peer's computation of a
round is five waits in the module's forward pass, 0.1 s together: real computation of 4 peers would
compete for the cores of this machine. The variants take turns in fresh processes. A round's time is
that between two optimizer steps of a peer; the bytes are those that its interface sent,
and the processor time that of all its processes. torch's
PowerSGD hook needs a single bucket over gloo, or collectives of different buckets cross; the other
variants have torch's default buckets.

rayhive's variants run through ``HivemindStrategy``, with the arguments that a study passes for the
codec, the rank and the delay, and nothing else. DDP runs in a plain loop, so that the times of
rayhive contain Lightning's loop and those of DDP don't; one more variant of the first cell runs
torch's PowerSGD hook in Lightning's loop, and no claim refers to it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.both_sides import PARAMETERS, RANK, Stops, Task, make_module, peer_rounds
from benchmarks.claims import Claim, print_claims
from benchmarks.ddp_side import hooked, lightning_rounds
from benchmarks.ratios import Ratio, ratio
from benchmarks.shaped_peers import Nodes, Seat, nodes, skipped
from benchmarks.swarm import conditions

#: Time limit under ``make bench`` [s].
LIMIT_S = 7200
BATCH, BATCHES = 32, 5
RATES_MBIT, RTTS_MS, PEERS = (10.0, 20.0, 100.0, 1000.0), (1.0, 80.0), (2, 4)
COMPUTE_S = 0.1
#: Learning rate: so low that the gradients of the one batch stay as at the beginning. A model that
#: learns it by heart has ever more zeros in 16 bits, which lossless coding shortens.
RATE = 1e-6
#: Rounds before the measurement.
WARM_UP = 3
#: Planned time of a turn [s], and limits of its number of rounds.
TURN_S, FEWEST, MOST = 8.0, 4, 30

#: DDP's communication hook by the name of the variant.
DDP = {"DDP fp32": None, "DDP fp16": "fp16", "DDP PowerSGD": "powersgd"}
#: The variant of DDP in Lightning's loop, and its hook.
IN_LIGHTNING, ITS_HOOK = "DDP PowerSGD, Lightning", "powersgd"
#: Configuration of rayhive's variants.
OURS: dict[str, dict[str, Any]] = {
    "none": {},
    "float16": {"codec": "float16"},
    "uniform8": {"codec": "uniform8"},
    "PowerSGD": {"powersgd_rank": RANK},
    "delay gradients": {"delay": "gradients"},
    "delay gradients, float16": {"delay": "gradients", "codec": "float16"},
    "delay gradients, PowerSGD": {"delay": "gradients", "powersgd_rank": RANK},
}
#: Variant of DDP with which a variant of rayhive is compared.
RIVAL = {
    "none": "DDP fp32",
    "float16": "DDP fp16",
    "uniform8": "DDP fp32",
    "PowerSGD": "DDP PowerSGD",
    "delay gradients": "DDP fp32",
    "delay gradients, float16": "DDP fp16",
    "delay gradients, PowerSGD": "DDP PowerSGD",
    IN_LIGHTNING: "DDP PowerSGD",
}
#: Bits of an element of a gradient, about, by a part of the variant's name; 32 for others.
BITS = {"PowerSGD": 1, "16": 16, "uniform8": 8}
EVERYWHERE = (*DDP, "none", "float16", "uniform8", "PowerSGD", "delay gradients")


@dataclass(frozen=True)
class Cell:
    """One swarm on one kind of links.

    Attributes:
        peers: Number of peers.
        rate_mbit: Rate of a link [Mbit/s].
        rtt_ms: Round trip between two peers [ms].
        compute_s: One peer's computation of a round [s].
        variants: Variants that run.
    """

    peers: int
    rate_mbit: float
    rtt_ms: float
    compute_s: float = COMPUTE_S
    variants: tuple[str, ...] = EVERYWHERE

    def rounds(self, name: str, most: int) -> int:
        """Return how many rounds of a variant fit into a turn, about."""
        bits = next((bits for part, bits in BITS.items() if part in name), 32)
        reduced = 2 * (self.peers - 1) / self.peers * PARAMETERS * bits * 1e-6 / self.rate_mbit
        return int(np.clip(TURN_S / (self.compute_s + reduced + self.rtt_ms / 100), FEWEST, most))

    def __str__(self) -> str:
        link = f"{self.rate_mbit:g} Mbit/s, {self.rtt_ms:g} ms"
        return f"{self.peers} peers, {link}, {self.compute_s:g} s of computation"


#: The cell of the claims, and those in which DDP communicates about as long as it computes.
JUDGED = Cell(4, 20.0, 1.0, variants=(*EVERYWHERE, IN_LIGHTNING))
ALIKE = (
    Cell(4, 20.0, 1.0, 1.9, ("DDP fp32", "delay gradients")),
    Cell(4, 20.0, 1.0, 1.0, ("DDP fp16", "delay gradients, float16")),
    Cell(4, 20.0, 1.0, 0.2, ("DDP PowerSGD", "delay gradients, PowerSGD")),
)


@dataclass
class Measured:
    """Rounds of one variant.

    Attributes:
        seconds: Durations of rounds, of all peers and turns [s].
        sent: Bytes that a peer sent in a round, by turn and peer.
        processor_s: Processor time of a peer in a round, by turn and peer [s].
        incomplete: Averagings that were not complete.
    """

    seconds: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    incomplete: int = 0


# -- in the peers ----------------------------------------------------------------------------------


def make_batch(index: int) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(index)
    return torch.randn(BATCH, 64, generator=generator), torch.arange(BATCH) % 10


def task_of(seat: Seat, settings: dict[str, Any]) -> Task:
    """Return what a peer or a rank trains."""
    import torch

    module, batch = make_module(settings["compute_s"] / BATCHES), make_batch(seat.index)

    def loss(module: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])

    return Task(module, loss, batch, BATCH, BATCHES, lambda p: torch.optim.Adam(p, lr=RATE))


def run_ddp(seat: Seat, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one rank; return its rounds."""
    import torch.distributed as dist

    task = task_of(seat, settings)
    module = hooked(seat, task.module, settings["hook"])
    optimizer, stops = task.optimizer(module.parameters()), Stops(WARM_UP)
    for round_ in range(settings["rounds"] + WARM_UP):
        for batch in range(BATCHES):
            last = batch == BATCHES - 1
            with contextlib.nullcontext() if last else module.no_sync():
                task.loss(module, task.batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        stops.note(round_ + 1)
    dist.barrier()
    return stops.result()


def run_in_lightning(seat: Seat, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one rank in Lightning's loop; return its rounds."""
    return lightning_rounds(seat, task_of(seat, settings), ITS_HOOK, settings["rounds"], WARM_UP)


def run_rayhive(seat: Seat, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer with the arguments of a study; return its rounds."""
    task, configuration = task_of(seat, settings), settings["configuration"]
    return peer_rounds(seat, configuration, task, settings["rounds"], WARM_UP)


# -- measurement -----------------------------------------------------------------------------------


def turn(name: str, cell: Cell, on: Nodes, rounds: int) -> list[dict[str, Any]]:
    """Run one variant once, and return the results of its peers."""
    settings: dict[str, Any] = {"compute_s": cell.compute_s, "rounds": rounds}
    if name in DDP:
        return on.run(run_ddp, {**settings, "hook": DDP[name]}, timeout=240)
    if name == IN_LIGHTNING:
        return on.run(run_in_lightning, settings, timeout=240)
    return on.run(run_rayhive, {**settings, "configuration": OURS[name]}, timeout=240)


def measure(cell: Cell, variants: list[str], repeats: int, most: int) -> dict[str, Measured]:
    """Run the variants in turns on fresh links, print a table, and return the rounds."""
    found = {name: Measured() for name in variants}
    with nodes(cell.peers, cell.rate_mbit, cell.rtt_ms) as on:
        print(f"\n{cell}; measured {on.rate_mbit:.1f} Mbit/s, {on.rtt_ms:.1f} ms", flush=True)
        for repeat in range(repeats):
            for name in reversed(variants) if repeat % 2 else variants:
                for peer in turn(name, cell, on, cell.rounds(name, most)):
                    found[name].seconds += peer["seconds"]
                    found[name].sent.append(peer["sent"])
                    found[name].processor_s.append(peer["processor_s"])
                    found[name].incomplete += peer["incomplete"]
    columns = ["variant", "s a round", "p5-p95", "kB sent", "processor ms"]
    print(f"| {' | '.join([*columns, 'over DDP (95 %)', 'rounds', 'incomplete'])} |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for name, rows in found.items():
        p5, p50, p95 = np.percentile(rows.seconds, [5, 50, 95])
        rival = RIVAL.get(name, "")
        over = str(ratio(rows.seconds, found[rival].seconds)) if rival in found else ""
        means = [f"{1e-3 * np.mean(rows.sent):.0f}", f"{1e3 * np.mean(rows.processor_s):.0f}"]
        cells = [f"{p50:.3f}", f"{p5:.2f}-{p95:.2f}", *means, over]
        counts = [str(cell.rounds(name, most) * repeats), str(rows.incomplete)]
        print(f"| {' | '.join([name, *cells, *counts])} |", flush=True)
    return found


def claims(cell: Cell, found: dict[str, Measured]) -> list[Claim]:
    """Return the claims about a cell, if both variants of each ran."""

    def claim(name: str, bound: float, faster: bool = False) -> list[Claim]:
        rival = RIVAL[name]
        if name not in found or rival not in found:
            return []
        above, below = (rival, name) if faster else (name, rival)
        over: Ratio = ratio(found[above].seconds, found[below].seconds)
        return [Claim(f"{cell}: {above} over {below}", *over, "x", bound, at_least=faster)]

    if cell == JUDGED:
        return [
            *claim("none", 1.1),
            *claim("float16", 1.1),
            *claim("PowerSGD", 1.0),
            *claim("uniform8", 3.0, faster=True),
        ]
    if cell in ALIKE:
        return claim(cell.variants[-1], 1.0, faster=True)
    return []


def chosen_cells(arguments: argparse.Namespace) -> list[Cell]:
    """Return the cells of ``--links`` and ``--peers``, those of the claims first."""
    known = [(rate, rtt) for rate in RATES_MBIT for rtt in RTTS_MS]
    links = [tuple(map(float, text.split(":"))) for text in arguments.links or ()] or known
    judged = (JUDGED.peers, JUDGED.rate_mbit, JUDGED.rtt_ms)
    grid = [
        JUDGED if (peers, rate, rtt) == judged else Cell(peers, rate, rtt)
        for peers in arguments.peers
        for rate, rtt in links
    ]
    alike = [] if arguments.links else [cell for cell in ALIKE if cell.peers in arguments.peers]
    return sorted(grid, key=lambda cell: cell != JUDGED) + alike


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--links", nargs="+", metavar="MBIT:MS", help="rate and round trip, as 20:1; default: all"
    )
    parser.add_argument("--peers", nargs="+", type=int, default=PEERS)
    parser.add_argument("--rounds", type=int, default=MOST, help="most rounds of a turn")
    parser.add_argument("--repeats", type=int, default=2, help="turns of each variant")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="VARIANT",
        choices=[*DDP, IN_LIGHTNING, *OURS],
        help="default: all",
    )
    parser.add_argument("--alike", action="store_true", help="only the cells about overlap")
    arguments = parser.parse_args()
    if skipped():
        return
    print(f"{PARAMETERS:,} parameters, median of all peers' rounds; {conditions()}")
    made: list[Claim] = []
    for cell in ALIKE if arguments.alike else chosen_cells(arguments):
        variants = [name for name in cell.variants if name in (arguments.only or cell.variants)]
        if variants:
            made += claims(cell, measure(cell, variants, arguments.repeats, arguments.rounds))
    print()
    print_claims(*made)


if __name__ == "__main__":
    main()
