"""Duration of a round, compared with hivemind's optimizer in the same run.

Claim: with a model of 0.3 million parameters on loopback, the median round of 2, 4 and 8 peers
takes at most 0.04, 0.12 and 0.40 s. Two peers of hivemind take at least 8 times as long with a
matchmaking window of 2 s, and 30 times with 5 s, which the documented strategy sets. hivemind's
best setting is a fixed group size, which has to equal the number of peers at all times; with it,
two peers are not faster than those of rayhive, which follow the number of peers by themselves.

All variants run the same loop on the same module; only the optimizer and its settings differ.
hivemind's peers average parameters in every round by default, and rayhive's only where they differ,
which is never here; so hivemind's are told not to. The variants alternate, so that other load
affects all of them.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from typing import Any

import numpy as np
import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.ratios import ratio
from benchmarks.swarm import conditions, join_swarm, run_swarm

BATCH = 32
#: Periods in which hivemind's peers fetch the progress of the swarm [s]; short, so that the
#: benchmark does not measure them.
SHORT_REFRESH = {
    "min_refresh_period": 0.02,
    "default_refresh_period": 0.2,
    "max_refresh_period": 1.0,
}
FIXED = "hivemind, fixed group size"
#: Matchmaking time of each variant, the longest wait for a group [s].
VARIANTS = {
    "rayhive": 5.0,
    "hivemind, window 2 s": 2.0,
    "hivemind, window 5 s": 5.0,
    FIXED: 2.0,
}
#: Number of peers to the limit of the median round [s].
BOUNDS = {2: 0.04, 4: 0.12, 8: 0.40}
#: Variant to the least ratio of its round to that of rayhive.
RATIOS = {"hivemind, window 2 s": 8.0, "hivemind, window 5 s": 30.0, FIXED: 1.0}
#: Measured rounds of hivemind's peers that wait for the end of the window, and warm-up rounds.
HIVEMINDS_ROUNDS, WARM_UP = 5, 2
#: Swarms that are tried until one has all its peers in all its rounds.
SWARMS = 3


def make_module() -> torch.nn.Module:
    """Return a perceptron with 0.3 million parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 448), torch.nn.ReLU(), torch.nn.Linear(448, 576), torch.nn.ReLU(),
        torch.nn.Linear(576, 10),
    )  # fmt: skip


def run_peer(index: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer for ``rounds`` rounds; return the seconds of each round."""
    import hivemind

    from rayhive.optim.optimizer import RayhiveOptimizer

    torch.set_num_threads(1)
    ours = settings["variant"] == "rayhive"
    dht = join_swarm(settings["initial_peers"])
    module = make_module()
    events: list[tuple[str, dict[str, Any]]] = []
    own_options: dict[str, Any] = {
        "tracker_opts": SHORT_REFRESH,
        "average_state_every": sys.maxsize,
    }
    if ours:
        own_options = {"on_event": lambda kind, fields: events.append((kind, fields))}
    elif settings["variant"] == FIXED:
        # hivemind passes averager_opts to the averager of parameters only
        size = {"target_group_size": settings["peers"]}
        factory = functools.partial(hivemind.optim.grad_averager.GradientAverager, **size)
        own_options |= {"averager_opts": size, "grad_averager_factory": factory}
    optimizer = (RayhiveOptimizer if ours else hivemind.Optimizer)(
        dht=dht,
        run_id="latency",
        target_batch_size=BATCH * settings["peers"] * 2,
        batch_size_per_step=BATCH,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
        matchmaking_time=settings["matchmaking_time"],
        averaging_timeout=30.0,
        delay_state_averaging=False,
        **own_options,
    )
    ended: list[float] = []
    alone = 0
    data = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(index))
    labels = torch.arange(BATCH) % 10
    round_ = optimizer.local_epoch
    last = round_ + settings["rounds"] + settings["warm_up"]
    while round_ < last:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(data), labels).backward()
        optimizer.step()
        if not ended and ours:
            assert optimizer.tracker.wait_for_peers(settings["peers"], 30)
            ended.append(time.perf_counter())
        elif not ended:
            # hivemind counts a peer from its first samples on; no peer may begin rounds alone
            while optimizer.tracker.global_progress.num_peers < settings["peers"]:
                optimizer.tracker.fetched_global_progress_this_epoch.wait(0.05)
                optimizer.tracker.fetched_global_progress_this_epoch.clear()
            ended.append(time.perf_counter())
        if optimizer.local_epoch != round_:
            round_ = optimizer.local_epoch
            ended.append(time.perf_counter())
            alone += not ours and optimizer.tracker.global_progress.num_peers < settings["peers"]
    alone += sum(kind == "round" and fields["outcome"] != "averaged" for kind, fields in events)
    seconds = np.diff(ended)[settings["warm_up"] :]
    optimizer.shutdown()
    dht.shutdown()
    return {
        "seconds": seconds.tolist(),
        "alone": alone,
        "parameters": sum(p.numel() for p in module.parameters()),
        "events": events,
    }


def measure(peers: int, variant: str, rounds: int) -> list[float]:
    """Return the seconds of every round of every peer of a fresh swarm.

    Raises:
        RuntimeError: A peer failed, or no swarm had all its peers in all its rounds.
    """
    settings = {
        "variant": variant,
        "rounds": rounds,
        "warm_up": WARM_UP,
        "matchmaking_time": VARIANTS[variant],
    }
    what = f"{peers} peers, {variant}"
    for _ in range(SWARMS):
        try:
            results = run_swarm(__file__, peers, settings, timeout=300)
        except RuntimeError as error:
            raise RuntimeError(f"{what}: {error}") from error
        alone = sum(result["alone"] for result in results)
        if not alone:
            return [value for result in results for value in result["seconds"]]
        print(f"{what}: left out a swarm with {alone} rounds that lacked a peer", flush=True)
    raise RuntimeError(f"{what}: none of {SWARMS} swarms had all its peers in all its rounds")


def median(values: list[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % bootstrap interval."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of rayhive's peers")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.peer is not None:
        print(json.dumps(run_peer(arguments.peer, json.loads(sys.stdin.readline()))), flush=True)
        return

    seconds: dict[tuple[int, str], list[float]] = {}
    for _ in range(arguments.repeats):
        for peers in BOUNDS:
            for variant in VARIANTS if peers == 2 else ["rayhive"]:
                brief = variant in ("rayhive", FIXED)
                rounds = arguments.rounds if brief else HIVEMINDS_ROUNDS
                seconds.setdefault((peers, variant), []).extend(measure(peers, variant, rounds))
    print(f"0.3 million parameters, {conditions()}")
    for (peers, variant), values in seconds.items():
        p5, p50, p95 = np.percentile(values, [5, 50, 95])
        spread = f"(p5 {p5:.3f}, p95 {p95:.3f}, n {len(values)})"
        print(f"{peers} peers, {variant}: p50 {p50:.3f} s {spread}")
    claims = [
        Claim(
            f"median round of {peers} peers",
            *median(seconds[peers, "rayhive"]),
            unit="s",
            bound=bound,
            at_least=False,
        )
        for peers, bound in BOUNDS.items()
    ]
    claims += [
        Claim(
            f"2 peers, {variant} over rayhive",
            *ratio(seconds[2, variant], seconds[2, "rayhive"]),
            unit="x",
            bound=bound,
            at_least=True,
        )
        for variant, bound in RATIOS.items()
    ]
    print_claims(*claims)


if __name__ == "__main__":
    main()
