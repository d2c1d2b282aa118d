"""Rounds of the PowerSGD paper's models over real connections, dense and at ranks 1, 2 and 4.

Claims, for ResNet-18 (CIFAR-10, 11.2 million parameters) and the LSTM (WikiText-2, 28.9 million) on
links of 20 Mbit/s: at rank 4, a round takes at most 1.0 times as long as with torch's PowerSGD hook
(DDP over gloo), and at most 1.0 times as long as with hivemind's PowerSGD.

Without arguments it measures what the claims need, a quarter of an hour; ``--links`` and
``--ranks`` measure the rest. Dense rounds on the slowest links take hours, as each lasts minutes.

The paper (arXiv:1905.13727) measured 16 GPUs on links of 10 Gbit/s. Here two peers are on links of
10 to 1000 Mbit/s, as volunteers' machines are. The modules have the models' parameters, and their
gradients are noise, which takes a few hundredths of a second: the rest of a round is compression
and communication, which do not depend on the values.

The systems take turns in fresh processes. rayhive runs through ``HivemindStrategy`` with default
options. hivemind's optimizer is set up for speed: groups of the known size, and no averaging of
parameters, which it would send in every round by default. torch's hook begins with PowerSGD, not
with the dense rounds that it needs to converge. A round's time is that between two optimizer steps
of a peer; the bytes are those that its interface sent.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.both_sides import RUN, Stops, Task, peer_rounds
from benchmarks.claims import Claim, print_claims
from benchmarks.ddp_side import hooked
from benchmarks.pictures import write_lines
from benchmarks.ratios import ratio
from benchmarks.shaped_peers import Nodes, Seat, nodes, skipped
from benchmarks.swarm import conditions

#: Time limit under ``make bench`` [s].
LIMIT_S = 3600
#: Name in the table to the workload with its shapes.
MODELS = {"ResNet-18": "resnet18_cifar10", "LSTM": "lstm_wikitext2"}
SYSTEMS = ("torch DDP", "hivemind", "rayhive")
JUDGED_MBIT, RTT_MS = 20.0, 1.0
#: Ranks of PowerSGD; 0 for dense gradients. The last one is judged.
RANKS = (0, 1, 2, 4)
PEERS, WARM_UP = 2, 1
#: Planned time of a turn's measured rounds [s], and limits of their number.
TURN_S, FEWEST, MOST = 10.0, 1, 8
#: Longest start and end of a turn [s], and longest round in times of 2 s and the bare link's time.
START_S, SLOWEST = 60.0, 5.0
#: Swarms that are tried until one has both its peers in all its rounds: hivemind's do not always.
SWARMS = 3
#: hivemind's longest wait for a group [s].
MATCHMAKING_S = 3.0

Rounds = dict[tuple[str, int], list[dict[str, Any]]]


# -- in the peers ----------------------------------------------------------------------------------


def task_of(model: str, peer: int) -> Task:
    """Return a module with the parameters of a model, whose gradients are noise of the peer."""
    import torch

    from rayhive.registry import WORKLOADS

    generator = torch.Generator().manual_seed(peer)
    shapes = WORKLOADS.get(MODELS[model])().parameter_shapes()
    noise = [torch.randn(shape, generator=generator) for shape in shapes]

    class Noise(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)

        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            products = [
                weight.mul(one).sum() for weight, one in zip(self.weights, noise, strict=True)
            ]
            return torch.stack(products).sum() * scale

    return Task(
        module=Noise(),
        loss=lambda module, batch: module(batch),
        batch=torch.ones(()),
        batch_size=1,
        batches=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    )


def run_ddp(seat: Seat, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one rank of DDP; return its rounds."""
    import torch.distributed as dist

    task, rank = task_of(settings["model"], seat.index), settings["rank"]
    hook = "powersgd" if rank else None
    module = hooked(seat, task.module, hook, rank=rank, skip_dense=True)
    optimizer, stops = task.optimizer(module.parameters()), Stops(WARM_UP)
    for round_ in range(settings["rounds"] + WARM_UP):
        task.loss(module, task.batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        stops.note(round_ + 1)
    dist.barrier()
    return stops.result()


def run_rayhive(seat: Seat, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer of rayhive; return its rounds."""
    configuration = {"powersgd_rank": settings["rank"]} if settings["rank"] else {}
    task = task_of(settings["model"], seat.index)
    return peer_rounds(seat, configuration, task, settings["rounds"], WARM_UP)


def run_hivemind(seat: Seat, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer of hivemind's optimizer; return its rounds."""
    import hivemind
    import torch
    from hivemind.optim.grad_averager import GradientAverager
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

    torch.set_num_threads(1)
    first, host = seat.found(), seat.hosts[seat.index]
    dht = hivemind.DHT(
        initial_peers=first, host_maddrs=[f"/ip4/{host}/tcp/0"], use_relay=False, start=True
    )
    seat.tell([str(address) for address in dht.get_visible_maddrs()])
    task, peers, rank = task_of(settings["model"], seat.index), len(seat.hosts), settings["rank"]
    size = {"target_group_size": peers}
    averager: Any = functools.partial(GradientAverager, **size)
    if rank:
        averager = functools.partial(PowerSGDGradientAverager, averager_rank=rank, **size)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id=RUN,
        target_batch_size=task.batch_size * task.batches * peers,
        batch_size_per_step=task.batch_size,
        optimizer=task.optimizer(task.module.parameters()),
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=settings["longest_s"],
        average_state_every=sys.maxsize,
        delay_state_averaging=False,
        grad_averager_factory=averager,
        averager_opts=size,
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2},
    )
    progress, stops = optimizer.tracker, Stops(WARM_UP)
    round_ = alone = 0
    while round_ < settings["rounds"] + WARM_UP:
        optimizer.zero_grad()
        task.loss(task.module, task.batch).backward()
        optimizer.step()
        while not round_ and progress.global_progress.num_peers < peers:  # all begin together
            progress.fetched_global_progress_this_epoch.wait(0.05)
            progress.fetched_global_progress_this_epoch.clear()
        if optimizer.local_epoch != round_:
            round_ = optimizer.local_epoch
            stops.note(round_)
            alone += round_ > WARM_UP and progress.global_progress.num_peers < peers
    optimizer.shutdown()
    dht.shutdown()
    return stops.result(alone)


RUNS = dict(zip(SYSTEMS, (run_ddp, run_hivemind, run_rayhive), strict=True))


# -- measurement -----------------------------------------------------------------------------------


def parameters_of(model: str) -> int:
    """Return the number of a model's parameters."""
    from rayhive.registry import WORKLOADS

    return sum(int(np.prod(shape)) for shape in WORKLOADS.get(MODELS[model])().parameter_shapes())


def settings_of(model: str, rank: int, rate_mbit: float) -> dict[str, Any]:
    """Return the settings of a turn, whose number of rounds follows from the bytes."""
    link_s = 0.0 if rank else parameters_of(model) * 32e-6 / rate_mbit
    rounds = int(np.clip(TURN_S / (1.0 + link_s), FEWEST, MOST))
    longest_s = SLOWEST * (2.0 + link_s)
    return {
        "model": model,
        "rank": rank,
        "rounds": rounds,
        "longest_s": longest_s,
        "timeout": START_S + longest_s * (rounds + WARM_UP),
    }


def turn(system: str, settings: dict[str, Any], on: Nodes) -> list[dict[str, Any]]:
    """Return the results of the peers of the first swarm whose rounds are complete, or the last."""
    for left in reversed(range(SWARMS)):
        try:
            results = on.run(RUNS[system], settings, settings["timeout"])
        except RuntimeError as error:
            if not left:
                raise
            print(f"{system}, {name_of(settings['rank'])}: once more, {error}", flush=True)
            continue
        if not any(peer["incomplete"] for peer in results):
            break
    print(
        f"{settings['model']}, {name_of(settings['rank'])}, {system}: "
        f"{np.median(seconds_of(results)):.3f} s a round",
        file=sys.stderr,
    )
    return results


def measure(
    model: str, ranks: list[int], systems: list[str], on: Nodes, repeats: int
) -> Iterator[tuple[tuple[str, int], list[dict[str, Any]]]]:
    """Run every system at every rank in turns; yield each turn's variant and peers' results."""
    for repeat in range(repeats):
        for rank in ranks:
            settings = settings_of(model, rank, on.rate_mbit)
            for system in reversed(systems) if repeat % 2 else systems:
                yield (system, rank), turn(system, settings, on)


def seconds_of(results: list[dict[str, Any]]) -> list[float]:
    """Return the durations of the rounds of all peers and turns [s]."""
    return [seconds for peer in results for seconds in peer["seconds"]]


def name_of(rank: int) -> str:
    """Return the name of a rank."""
    return f"rank {rank}" if rank else "dense"


def print_table(model: str, rate_mbit: float, found: Rounds) -> None:
    """Print one row for each system and rank."""
    print(f"\n{model}, {rate_mbit:g} Mbit/s")
    print("| gradients | system | s a round | fastest-slowest | kB sent | rounds | incomplete |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for (system, rank), results in sorted(found.items(), key=lambda item: item[0][1]):
        seconds = seconds_of(results)
        spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
        sent = np.mean([peer["sent"] for peer in results]) / 1e3
        incomplete = sum(peer["incomplete"] for peer in results)
        cells = [name_of(rank), system, f"{np.median(seconds):.3f}", spread, f"{sent:.0f}"]
        print(f"| {' | '.join(cells)} | {len(seconds)} | {incomplete} |", flush=True)


def claims(model: str, found: Rounds) -> list[Claim]:
    """Return the claims about rank 4, if it was measured."""
    made = []
    for rival in SYSTEMS[:-1]:
        if found[SYSTEMS[-1], RANKS[-1]] and found[rival, RANKS[-1]]:
            ours, theirs = (seconds_of(found[system, RANKS[-1]]) for system in (SYSTEMS[-1], rival))
            text = f"{model}, {JUDGED_MBIT:g} Mbit/s, rank {RANKS[-1]}: rayhive over {rival}"
            made.append(Claim(text, *ratio(ours, theirs), "x", 1.0, at_least=False))
    return made


def draw(folder: Path, model: str, found: dict[float, Rounds]) -> None:
    """Draw the seconds a round over the links, dense and at rank 4."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"powersgd-{MODELS[model]}.svg"
    lines = {
        f"{system}, {name_of(rank)}": [
            (rate, float(np.median(seconds_of(rounds[system, rank]))))
            for rate, rounds in sorted(found.items())
            if rounds[system, rank]
        ]
        for rank in (RANKS[0], RANKS[-1])
        for system in SYSTEMS
    }
    write_lines(path, f"{model}: median round of two peers", "link [Mbit/s]", "round [s]", lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--links", nargs="+", type=float, metavar="MBIT", default=[JUDGED_MBIT])
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=RANKS[-1:])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--repeats", type=int, default=2, help="turns of each variant")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw the models there")
    arguments = parser.parse_args()
    if skipped():
        return
    print(f"{arguments.peers} peers, median of all peers' rounds; {conditions()}")
    made: list[Claim] = []
    measured: dict[str, dict[float, Rounds]] = {model: {} for model in arguments.models}
    for rate in arguments.links:
        with nodes(arguments.peers, rate, RTT_MS) as on:
            for model in arguments.models:
                found: Rounds = defaultdict(list)
                variants = arguments.ranks, arguments.systems
                try:
                    for variant, results in measure(model, *variants, on, arguments.repeats):
                        found[variant] += results
                finally:  # also when it is interrupted: the slowest links take long
                    print_table(model, rate, found)
                measured[model][rate] = found
                made += claims(model, found) if rate == JUDGED_MBIT else []
                if arguments.pictures:
                    draw(arguments.pictures, model, measured[model])
    print()
    print_claims(*made)


if __name__ == "__main__":
    main()
