"""How long a round takes between two peers, against hivemind's own optimizer in the same run.

Claim: with two peers on loopback and a model of 0.3 million parameters, the median round takes
at most 0.3 s, and at least 8 times less than the same module under hivemind's plain settings
(``matchmaking_time=2``, no group size).

Both variants run the same loop on the same module; only the optimizer and its settings differ.
The variants alternate, so that what else the machine does hits both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.swarm import conditions, run_swarm

BATCH = 32
#: hivemind's peers look for each other's progress so often [s], so that this is not measured.
SHORT_REFRESH = {
    "min_refresh_period": 0.02,
    "default_refresh_period": 0.2,
    "max_refresh_period": 1.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "hivemind": {"matchmaking_time": 2.0},
    "rayhive": {"matchmaking_time": 5.0},
}


def make_module() -> torch.nn.Module:
    """Return a perceptron of 0.3 million parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 448), torch.nn.ReLU(), torch.nn.Linear(448, 576), torch.nn.ReLU(),
        torch.nn.Linear(576, 10),
    )  # fmt: skip


def run_peer(index: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer for ``rounds`` rounds; return the seconds of each."""
    import hivemind

    from rayhive.peer.optimizer import RayhiveOptimizer

    torch.set_num_threads(1)
    ours = settings["variant"] == "rayhive"
    dht = hivemind.DHT(
        initial_peers=settings["initial_peers"] or None,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        use_relay=False,
        start=True,
    )
    print(json.dumps([str(address) for address in dht.get_visible_maddrs()]), flush=True)
    module = make_module()
    events: list[tuple[str, dict[str, Any]]] = []
    ours_alone = {"on_event": lambda kind, fields: events.append((kind, fields))}
    optimizer = (RayhiveOptimizer if ours else hivemind.Optimizer)(
        dht=dht,
        run_id=f"latency-{settings['variant']}",
        target_batch_size=BATCH * settings["peers"] * 2,
        batch_size_per_step=BATCH,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
        matchmaking_time=settings["matchmaking_time"],
        averaging_timeout=30.0,
        delay_state_averaging=False,
        **(ours_alone if ours else {"tracker_opts": SHORT_REFRESH}),
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
            # hivemind counts a peer from its first samples on; nobody may run ahead alone
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
    if alone:
        raise RuntimeError(f"{alone} rounds were done without all the peers: not a measurement")
    return {
        "seconds": seconds.tolist(),
        "parameters": sum(p.numel() for p in module.parameters()),
        "events": events,
    }


def ratio_interval(slow: np.ndarray, fast: np.ndarray, draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the ratio of medians."""
    generator = np.random.default_rng(0)
    medians = [
        np.median(generator.choice(slow, len(slow))) / np.median(generator.choice(fast, len(fast)))
        for _ in range(draws)
    ]
    low, high = np.percentile(medians, [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the slower variant")
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.peer is not None:
        print(json.dumps(run_peer(arguments.peer, json.loads(sys.stdin.readline()))), flush=True)
        return

    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(arguments.repeats):
        for name, options in VARIANTS.items():
            rounds = arguments.rounds * (6 if name == "rayhive" else 1)
            settings = {"variant": name, "rounds": rounds, "warm_up": 2, **options}
            results = run_swarm(__file__, arguments.peers, settings, timeout=240)
            seconds[name] += [value for result in results for value in result["seconds"]]
    print(f"{arguments.peers} peers, {results[0]['parameters']:,} parameters, {conditions()}")
    for name, values in seconds.items():
        p5, p50, p95 = np.percentile(values, [5, 50, 95])
        print(f"{name:>9}: p50 {p50:.3f} s   (p5 {p5:.3f}, p95 {p95:.3f}, n {len(values)})")
    slow, fast = (np.array(seconds[name]) for name in ("hivemind", "rayhive"))
    low, high = ratio_interval(slow, fast)
    ratio = np.median(slow) / np.median(fast)
    print(f"ratio of medians {ratio:.1f}x, 95 % interval {low:.1f}-{high:.1f}")


if __name__ == "__main__":
    main()
