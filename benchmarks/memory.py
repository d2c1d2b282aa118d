"""Copies of a model that one peer holds in all its processes, against hivemind's.

Claim: between rounds and at the peak of a round, a peer of rayhive holds at most 0.55 times as much
as a peer of hivemind with the same options, and at most 0.75 times with PowerSGD. With delayed
gradients the claim is about the peak: rounds follow each other without a pause. What an option does
not say is the default: hivemind averages parameters in every round, rayhive where they differ.

The memory of a peer is the proportional share (PSS) of anonymous and shared memory of all its
processes. The same swarm with a tiny module shows what the processes take without copies; the rest,
divided by the size of the parameters, is the number of copies. Parameters, gradients and the two
moments of Adam are four copies, as without any swarm. The C library is set to return free blocks
to the system at once (``MALLOC_MMAP_THRESHOLD_``), which a user does not do.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.runs import ratio_of_runs
from benchmarks.swarm import conditions, join_swarm, run_swarm

PEERS, BATCH = 2, 32
#: Width of the layers: four of them have 25 million parameters, and 16 thousand.
LARGE, TINY = 2500, 64
#: Times at which the memory is read.
TIMES = ("between rounds", "at the peak")
#: Variant to the largest ratio of rayhive's copies to hivemind's.
BOUNDS = {
    "dense": 0.55,
    "reuse_grad_buffers": 0.55,
    "8 bit": 0.55,
    "PowerSGD rank 4": 0.75,
    "offload_optimizer": 0.55,
    "delay: gradients": 0.55,
    "parameters in every round": 0.55,
}
#: Variants without a pause between rounds.
WITHOUT_PAUSE = {"delay: gradients"}
#: Pause between two readings of the memory [s].
PAUSE_S = 0.02
#: Swarms that are tried until one has both its peers in all its rounds.
SWARMS = 3
#: Longest time of a swarm [s].
SWARM_S = 180.0
#: Size from which on the C library maps each block by itself [bytes], and gives it back when it is
#: free. By default it keeps free blocks, and the result would be what it keeps.
MMAP_FROM = 1 << 20
LIMIT_S = 2700


@dataclass(frozen=True)
class Variant:
    """Options of a peer.

    Attributes:
        codec: hivemind's name of the codec of gradients; None for none.
        rank: Rank of PowerSGD; None for dense gradients.
        offloaded: Whether the optimizer is made anew, on the host.
        own: Whether only rayhive has these options.
        options: Options of the optimizer.
    """

    codec: str | None = None
    rank: int | None = None
    offloaded: bool = False
    own: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


_DELAYED = {"delay_state_averaging": True, "delay_optimizer_step": True}
VARIANTS = {
    "dense": Variant(),
    "reuse_grad_buffers": Variant(options={"reuse_grad_buffers": True}),
    "8 bit": Variant(codec="Uniform8BitQuantization"),
    "8 bit, error feedback": Variant(
        codec="Uniform8BitQuantization", own=True, options={"error_feedback": True}
    ),
    "PowerSGD rank 4": Variant(rank=4),
    "offload_optimizer": Variant(offloaded=True),
    "delay: gradients": Variant(offloaded=True, options={**_DELAYED, "delay_grad_averaging": True}),
    "parameters in every round": Variant(options={"average_state_every": 1}),
}


def make_module(width: int) -> torch.nn.Module:
    """Return four square layers."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(4)]
    return torch.nn.Sequential(*layers)


def resident() -> dict[str, int]:
    """Return the memory of each process of this peer [bytes], by name and number."""
    own = psutil.Process()
    found = {}
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.Error):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            sizes = dict(line.split(":", 1) for line in text.splitlines()[1:])
            kinds = (sizes["Pss_Anon"], sizes["Pss_Shmem"])
            found[f"{process.name()} {process.pid}"] = sum(
                int(size.split()[0]) * 1024 for size in kinds
            )
    return found


class Sampler(threading.Thread):
    """Reads the memory of this peer again and again, until :meth:`stop`.

    Attributes:
        peak: The largest sum so far [bytes].
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._stopped = 0, threading.Event()

    def run(self) -> None:
        """Read."""
        while not self._stopped.wait(PAUSE_S):
            self.peak = max(self.peak, sum(resident().values()))

    def stop(self) -> None:
        """End, and wait for the last reading."""
        self._stopped.set()
        self.join()


def run_peer(index: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer for some rounds; return the memory between rounds and the peak in bytes."""
    import hivemind
    from hivemind.optim.grad_averager import GradientAverager
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

    from rayhive.optim.optimizer import RayhiveOptimizer

    torch.set_num_threads(1)
    variant, ours = VARIANTS[settings["variant"]], settings["ours"]
    dht = join_swarm(settings["initial_peers"])
    module = make_module(settings["width"])
    adam = functools.partial(torch.optim.Adam, lr=1e-4)
    options: dict[str, Any] = {"delay_state_averaging": False, **variant.options}
    if variant.codec is not None:
        options["grad_compression"] = getattr(hivemind.compression, variant.codec)()
    factory: Any = GradientAverager
    if variant.rank is not None:
        factory = functools.partial(PowerSGDGradientAverager, averager_rank=variant.rank)
    events: list[str] = []
    if ours:
        options["on_event"] = lambda kind, fields: (
            events.append(fields["outcome"]) if kind == "round" else None
        )
    optimizer = (RayhiveOptimizer if ours else hivemind.Optimizer)(
        dht=dht,
        run_id="memory",
        target_batch_size=BATCH * settings["peers"] * 2,
        batch_size_per_step=BATCH,
        params=list(module.parameters()) if variant.offloaded else None,
        optimizer=adam if variant.offloaded else adam(module.parameters()),
        offload_optimizer=variant.offloaded,
        matchmaking_time=5.0 if ours else 2.0,
        averaging_timeout=60.0,
        grad_averager_factory=factory,
        **options,
    )
    data = torch.randn(BATCH, settings["width"], generator=torch.Generator().manual_seed(index))
    rounds, alone, sampler = 0, 0, Sampler()
    between: list[int] = []
    reused = variant.options.get("reuse_grad_buffers")
    while rounds < settings["rounds"]:
        before = optimizer.local_epoch
        if not reused:
            optimizer.zero_grad()
        if ours:
            optimizer.begin_batch()
        module(data).square().mean().backward()
        optimizer.step()
        if not sampler.is_alive():
            wait_for_peers(optimizer, settings["peers"], ours)
            sampler.start()
        if optimizer.local_epoch != before:
            rounds += 1
            alone += not ours and (optimizer.tracker.global_progress.num_peers < settings["peers"])
        if rounds:
            between.append(sum(resident().values()))
    sampler.stop()
    alone += sum(outcome != "averaged" for outcome in events)
    optimizer.shutdown()
    dht.shutdown()
    return {
        "between rounds": min(between),
        "at the peak": sampler.peak,
        "alone": alone,
        "model": sum(4 * p.numel() for p in module.parameters()),
    }


def wait_for_peers(optimizer: Any, peers: int, ours: bool) -> None:
    """Wait until all peers are known, so that no peer begins a round alone."""
    if ours:
        assert optimizer.tracker.wait_for_peers(peers, 60)
        return
    while optimizer.tracker.global_progress.num_peers < peers:
        optimizer.tracker.fetched_global_progress_this_epoch.wait(0.05)
        optimizer.tracker.fetched_global_progress_this_epoch.clear()


def measure(variant: str, ours: bool, width: int, rounds: int) -> list[dict[str, Any]]:
    """Return the results of both peers of a swarm.

    Raises:
        RuntimeError: No swarm had both its peers in all its rounds.
    """
    settings = {"variant": variant, "ours": ours, "width": width, "rounds": rounds}
    for _ in range(SWARMS):
        try:
            results = run_swarm(__file__, PEERS, settings, timeout=SWARM_S)
        except subprocess.TimeoutExpired:  # peers of hivemind that do not meet again
            print(f"{variant}: left out a swarm that did not end", flush=True)
            continue
        if not any(result["alone"] for result in results):
            return results
        print(f"{variant}: left out a swarm with rounds that lacked a peer", flush=True)
    raise RuntimeError(f"{variant}: none of {SWARMS} swarms had both its peers in all its rounds")


def copies(ours: bool, rounds: int, names: Iterable[str]) -> dict[str, dict[str, list[float]]]:
    """Measure the variants on one side.

    Returns:
        Copies of the model, by variant and time, one per peer.
    """
    side = "rayhive" if ours else "hivemind"
    found: dict[str, dict[str, list[float]]] = {}
    for name in names:
        if ours or not VARIANTS[name].own:
            tiny, results = (measure(name, ours, width, rounds) for width in (TINY, LARGE))
            least = {when: min(result[when] for result in tiny) for when in TIMES}
            found[name] = {
                when: [(result[when] - least[when]) / result["model"] for result in results]
                for when in TIMES
            }
            said = ", ".join(f"{mean(found[name][when]):.1f} {when}" for when in TIMES)
            own = f"{least[TIMES[0]] / 1e6:.0f} MB of the processes themselves"
            print(f"{side}, {name}: {said}; {own}", flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(VARIANTS), help="some of the variants")
    arguments = parser.parse_args()
    if arguments.peer is not None:
        print(json.dumps(run_peer(arguments.peer, json.loads(sys.stdin.readline()))), flush=True)
        return
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_FROM)
    print(f"copies of 25 million float32 parameters in a peer, {conditions()}", flush=True)
    rayhive, hivemind = (copies(ours, arguments.rounds, arguments.only) for ours in (True, False))
    print_claims(
        *(
            Claim(
                f"copies {when}, {name}, rayhive over hivemind",
                *ratio_of_runs(rayhive[name][when], hivemind[name][when]),
                unit="x",
                bound=bound,
                at_least=False,
            )
            for name, bound in BOUNDS.items()
            if name in hivemind
            for when in (TIMES[1:] if name in WITHOUT_PAUSE else TIMES)
        )
    )


if __name__ == "__main__":
    main()
