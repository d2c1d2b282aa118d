"""Round trips of a round: from the last gradient of any peer to the last optimizer step.

Claims, for 2 and 4 peers, a round trip of 80 ms and about 20 kB of payload: a round takes at most
3.5 round trips with dense gradients, and at most 4.5 with PowerSGD of rank 4, which averages twice.

Peers run ``RayhiveOptimizer`` with default options, and compute nothing: a batch's gradient is
there at once. The time of a round is that from the moment at which the last peer has its gradient
to the moment at which the last peer has applied the average, over the measured round trip. The
announcement that the round is due is part of it.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.ratios import Ratio, ratio
from benchmarks.shaped_peers import Nodes, Seat, nodes, skipped
from benchmarks.swarm import conditions

RATE_MBIT, RTT_MS, BATCH, RANK = 100.0, 80.0, 4, 4
#: Rounds before the measurement.
WARM_UP = 4
#: Shape of the matrix and rank of PowerSGD, for about 20 kB of payload.
VARIANTS = {"dense": ((50, 100), None), "PowerSGD": ((600, 650), RANK)}
#: Variant to the most round trips.
BOUNDS = {"dense": 3.5, "PowerSGD": 4.5}
PEERS = (2, 4)
LIMIT_S = 600


def run_peer(seat: Seat, settings: dict[str, Any]) -> list[tuple[float, float]]:
    """Train one peer; return the times of its gradient and of its step, by round."""
    import hivemind
    import torch
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

    from rayhive.optim.optimizer import RayhiveOptimizer

    torch.set_num_threads(1)
    first = seat.found()
    address = f"/ip4/{seat.hosts[seat.index]}/tcp/0"
    dht = hivemind.DHT(initial_peers=first, host_maddrs=[address], use_relay=False, start=True)
    seat.tell([str(address) for address in dht.get_visible_maddrs()])
    peers = len(seat.hosts)
    shape, rank = settings["shape"], settings["rank"]
    factory = functools.partial(PowerSGDGradientAverager, averager_rank=rank)
    parameter = torch.nn.Parameter(torch.zeros(*shape))
    gradient = torch.randn(*shape, generator=torch.Generator().manual_seed(seat.index))
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="round-trips",
        target_batch_size=BATCH * peers,
        batch_size_per_step=BATCH,
        optimizer=torch.optim.SGD([parameter], lr=0.01),
        grad_averager_factory=None if rank is None else factory,
    )
    assert optimizer.tracker.wait_for_peers(peers, 60)
    times = []
    while optimizer.local_epoch < settings["rounds"]:
        before = optimizer.local_epoch
        optimizer.zero_grad()
        parameter.grad = gradient.clone()
        ready = time.monotonic()
        optimizer.step()
        if optimizer.local_epoch != before:
            times.append((ready, time.monotonic()))
    optimizer.settle()
    optimizer.shutdown()
    dht.shutdown()
    return times


def measure(name: str, on: Nodes, rounds: int) -> Ratio:
    """Run one variant; return the round trips of its median round."""
    shape, rank = VARIANTS[name]
    settings = {"shape": shape, "rank": rank, "rounds": rounds + WARM_UP}
    peers = on.run(run_peer, settings, timeout=120)
    seconds = [
        max(stepped for _, stepped in times) - max(ready for ready, _ in times)
        for times in list(zip(*peers, strict=True))[WARM_UP:]
    ]
    return ratio(seconds, [on.rtt_ms / 1e3] * len(seconds))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--peers", nargs="+", type=int, default=PEERS)
    arguments = parser.parse_args()
    if skipped():
        return
    print(conditions())
    made = []
    for peers in arguments.peers:
        with nodes(peers, RATE_MBIT, RTT_MS) as on:
            print(f"{peers} peers: measured {on.rate_mbit:.0f} Mbit/s, {on.rtt_ms:.1f} ms")
            for name, bound in BOUNDS.items():
                trips = measure(name, on, arguments.rounds)
                text = f"round trips of a round, {peers} peers, {name}"
                made.append(Claim(text, *trips, "", bound, at_least=False))
    print_claims(*made)


if __name__ == "__main__":
    main()
