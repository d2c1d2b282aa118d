"""Throughput of each delay mode on a slow link: the benefit of averaging in the background.

Claim: with 4 peers on links of 20 Mbit/s, ``delay: gradients`` gives at least 1.5 times the
samples per second of ``delay: none`` with the same codec, when communication takes about as long
as computation.

Every peer has its own network namespace and a link that is shaped in both directions. If the
machine does not allow that, the averagers throttle their messages, and the output says so.
Computation is a wait in the module's forward pass, as for work on a GPU: real computation of 4
peers would compete for the cores of this machine. The length of the wait is measured first, and is
about the time that a round takes besides its computation. The modes take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.links import Links, Throttle, become_root, links
from benchmarks.runs import ratio_of_runs
from benchmarks.swarm import conditions, die_with_parent, end_on_sigterm, join_swarm, run_swarm

MODES = ("none", "state", "optimizer", "gradients")
PEERS, RATE_MBIT, BOUND = 4, 20.0, 1.5
BATCH, BATCHES_PER_ROUND = 32, 8
#: First length of the computation [s per round], and largest ratio of computation and
#: communication that counts as alike.
FIRST_COMPUTE_S, ALIKE = 2.0, 1.2


class Waiting(torch.nn.Module):
    """Module of 0.75 million parameters with a wait in its forward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 768), torch.nn.ReLU(), torch.nn.Linear(768, 896), torch.nn.ReLU(),
            torch.nn.Linear(896, 10),
        )  # fmt: skip

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Return the logits after the wait."""
        time.sleep(self.seconds)
        return self.layers(data)


def run_peer(index: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train one peer; return its rounds and the time of each transition."""
    from rayhive.optim.optimizer import RayhiveOptimizer
    from rayhive.registry import CODECS
    from rayhive.spec.axes.delay import DELAY_FLAGS

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if settings["throttle_mbit"]:
        Throttle(settings["throttle_mbit"]).install()
    dht = join_swarm(settings["initial_peers"], settings["hosts"][index])
    module = Waiting(settings["compute_s"] / BATCHES_PER_ROUND)
    events: list[tuple[str, float, dict[str, Any]]] = []
    # hivemind's optimizer delays the averaging of parameters by default
    flags = {"delay_state_averaging": False, **DELAY_FLAGS[settings["mode"]]}
    recreated = bool(flags.get("offload_optimizer"))
    adam = torch.optim.Adam(module.parameters(), lr=1e-3)
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="overlap",
        target_batch_size=BATCH * BATCHES_PER_ROUND * settings["peers"],
        batch_size_per_step=BATCH,
        params=list(module.parameters()) if recreated else None,
        optimizer=(lambda params: torch.optim.Adam(params, lr=1e-3)) if recreated else adam,
        matchmaking_time=5.0,
        averaging_timeout=60.0,
        grad_compression=CODECS.get(settings["codec"])().build(None),
        state_averaging_compression=CODECS.get(settings["codec"])().build(None),
        on_event=lambda kind, fields: events.append((kind, time.time(), fields)),
        **flags,
    )
    if not optimizer.tracker.wait_for_peers(settings["peers"], timeout=60.0):
        raise RuntimeError("the other peers did not join within 60 s")
    data = torch.randn(BATCH, 64, generator=torch.Generator().manual_seed(index))
    labels = torch.arange(BATCH) % 10
    while optimizer.local_epoch < settings["warm_up"] + settings["rounds"]:
        optimizer.zero_grad(set_to_none=not recreated)
        torch.nn.functional.cross_entropy(module(data), labels).backward()
        optimizer.step()
    optimizer.state_averager.step(wait_for_delayed_updates=True)
    optimizer.shutdown()
    dht.shutdown()
    return {
        "ended": {fields["round"]: at for kind, at, fields in events if kind == "transition"},
        "rounds": [fields for kind, _, fields in events if kind == "round"],
        "state_rounds": [fields for kind, _, fields in events if kind == "state_round"],
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
    }


def run_mode(mode: str, compute_s: float, rounds: int, warm_up: int, codec: str, net: Links) -> Any:
    """Run a swarm; return its samples per second, seconds per round, and outcomes of rounds."""
    settings = {
        "mode": mode,
        "compute_s": compute_s,
        "rounds": rounds,
        "warm_up": warm_up,
        "codec": codec,
        "hosts": net.hosts,
        "throttle_mbit": None if net.shaped else net.rate_mbit,
    }
    peers = run_swarm(__file__, PEERS, settings, timeout=240, launchers=net.launchers)
    # a round ends with the transition of the last peer
    first, last = (
        max(peer["ended"][str(round_)] for peer in peers) for round_ in (warm_up, warm_up + rounds)
    )
    measured = range(warm_up + 1, warm_up + rounds + 1)
    gradient = [event for peer in peers for event in peer["rounds"] if event["round"] in measured]
    state = [event for peer in peers for event in peer["state_rounds"]]
    committed = sum(e["samples"] for e in gradient if e["outcome"] in ("averaged", "partial"))
    whole = [event for event in gradient if event["outcome"] == "averaged"]
    rates = [event["sent_bytes"] * 8e-6 / event["averaging_s"] for event in whole]
    return {
        "samples_per_s": committed / (last - first),
        "round_s": (last - first) / rounds,
        "outcomes": Counter(event["outcome"] for event in gradient),
        "state_outcomes": Counter(event["outcome"] for event in state),
        "sizes": Counter(event.get("group_size", 1) for event in gradient),
        "mbit": float(np.median(rates)) if rates else 0.0,
        "parameters": peers[0]["parameters"],
    }


def find_compute_s(rounds: int, codec: str, net: Links) -> tuple[float, int]:
    """Return a computation time close to that of communication [s], and the parameter count."""
    compute_s = FIRST_COMPUTE_S
    for _ in range(3):
        result = run_mode("none", compute_s, rounds, 1, codec, net)
        communication_s = result["round_s"] - compute_s
        if 1 / ALIKE < communication_s / compute_s < ALIKE:
            break
        compute_s = round(communication_s, 2)
    return compute_s, result["parameters"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--codec", default="float16", help="codec of gradients and parameters")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--no-shaping", action="store_true", help="throttle in averagers instead")
    arguments = parser.parse_args()
    if arguments.peer is not None:
        die_with_parent()
        print(json.dumps(run_peer(arguments.peer, json.loads(sys.stdin.readline()))), flush=True)
        return

    if not arguments.no_shaping:
        become_root()
    end_on_sigterm()
    with links(PEERS, RATE_MBIT, shape=not arguments.no_shaping) as net:
        report(arguments, net)


def report(arguments: argparse.Namespace, net: Links) -> None:
    """Measure the communication, then the modes in turns, and print the results."""
    if net.shaped:
        print(f"links: shaped to {RATE_MBIT:g} Mbit/s, measured {net.measured_mbit():.1f} Mbit/s")
    else:
        print(f"links: not shaped; averagers throttle what they send to {RATE_MBIT:g} Mbit/s")
    compute_s, parameters = find_compute_s(arguments.rounds, arguments.codec, net)
    print(
        f"{PEERS} peers, {parameters:,} parameters, {arguments.codec}, parameters averaged "
        f"where they differ, {conditions()}"
    )
    print(
        f"computation is simulated: {BATCHES_PER_ROUND} waits of "
        f"{compute_s / BATCHES_PER_ROUND:.3f} s, {compute_s:.2f} s a round"
    )
    runs: dict[str, list[Any]] = {mode: [] for mode in arguments.modes}
    for repeat in range(arguments.repeats):
        for mode in arguments.modes if repeat % 2 else reversed(arguments.modes):
            runs[mode].append(run_mode(mode, compute_s, arguments.rounds, 1, arguments.codec, net))
    for mode, results in runs.items():
        totals = {
            key: sum((result[key] for result in results), Counter())
            for key in ("outcomes", "state_outcomes", "sizes")
        }
        rates = [result["samples_per_s"] for result in results]
        print(
            f"{mode:>9}: {np.mean(rates):6.1f} samples/s ({min(rates):.1f}-{max(rates):.1f})   "
            f"round {np.mean([result['round_s'] for result in results]):.2f} s   "
            f"all-reduce sends {np.mean([result['mbit'] for result in results]):.1f} Mbit/s   "
            f"rounds {dict(totals['outcomes'])}, of parameters {dict(totals['state_outcomes'])}, "
            f"group sizes {dict(totals['sizes'])}"
        )
        if set(totals["outcomes"]) | set(totals["state_outcomes"]) != {"averaged"}:
            print(f"{mode:>9}: not all rounds were complete, so this does not measure overlap")
    communication = np.mean([result["round_s"] for result in runs["none"]]) - compute_s
    share = communication / compute_s
    print(f"communication over computation in the runs of none: {share:.2f}")
    if not 1 / ALIKE < share < ALIKE:
        print("skipped: communication is not about as long as computation, so there is no claim")
        return
    rates = {mode: [run["samples_per_s"] for run in results] for mode, results in runs.items()}
    ratio, low, high = ratio_of_runs(rates["gradients"], rates["none"])
    text = f"samples/s of delay gradients over none, {PEERS} peers at {RATE_MBIT:g} Mbit/s"
    print_claims(Claim(text, ratio, low, high, "x", BOUND, at_least=True))


if __name__ == "__main__":
    main()
