"""Cost and speed of membership and group formation in swarms of 4 to 256 peers.

Claims: with 4, 16, 64 and 256 peers, a peer's heartbeats are on average at most 16 messages and
1,500 bytes a second; a death is noticed by all peers within 2 s if its machine refuses connections,
and within 5.5 s if it does not answer; no live peer is taken for lost; and a group forms within
half a second.

The memberships and group formations are the real ones; their clock and network are simulated. The
links have latencies of 5 to 50 ms, and 1 % of the packets are lost and sent again after 0.2 s. All
times are virtual, so other load does not matter. Messages and bytes are those that pass a peer in
both directions, without the headers of the network.

Real peers (``--real``, 16 by default) train with each other on this machine. Their processes
share its cores; a death is that of all processes of a peer, killed or stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.claims import Claim, print_claims
from benchmarks.real_swarm import measure_real
from benchmarks.simulated_swarm import SimulatedSwarm
from benchmarks.swarm import conditions
from benchmarks.virtual_time import VirtualLoop

#: Time limit under ``make bench`` [s].
LIMIT_S = 3600
SIZES = (4, 16, 64, 256)
STEADY_S, LOSS = 10.0, 0.01
#: Peers end their part of a round within this time [s].
SPREAD_S = 0.1


@dataclass
class Found:
    """Measurements of one size, over seeds.

    Attributes:
        messages: Messages of a peer's heartbeats, each second.
        bytes: Bytes of these.
        refused_s: Time until a peer notices the death of another whose machine refuses [s].
        silent_s: Time until it notices the death of one that does not answer [s].
        news_s: Time from the last announcement of a round until a peer knows all of them [s].
        news_messages: Messages of a peer for all announcements of a round.
        news_bytes: Bytes of these.
        group_s: Time from the last peer's arrival until all have the group [s].
        group_bytes: Bytes of a peer for a group: median, and of the leader.
        wrong: How often a peer took a live one for lost, looked at every 10 ms.
    """

    messages: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    silent_s: list[float] = field(default_factory=list)
    news_s: list[float] = field(default_factory=list)
    news_messages: list[float] = field(default_factory=list)
    news_bytes: list[float] = field(default_factory=list)
    group_s: list[float] = field(default_factory=list)
    group_bytes: list[tuple[float, float]] = field(default_factory=list)
    wrong: int = 0


async def measure(size: int, seed: int, found: Found) -> None:
    """Measure one swarm."""
    loop = asyncio.get_running_loop()
    swarm = SimulatedSwarm(size, loss=LOSS, seed=seed)
    network = swarm.network
    await swarm.start(pause_s=0.5 / size)
    await swarm.all_known()
    watch = asyncio.create_task(count_false_losses(swarm, found))
    await asyncio.sleep(2.0)
    network.reset()
    await asyncio.sleep(STEADY_S)
    found.messages += [traffic.messages / STEADY_S for traffic in network.traffic.values()]
    found.bytes += [traffic.bytes / STEADY_S for traffic in network.traffic.values()]

    network.reset()

    async def announce(number: int) -> None:
        await asyncio.sleep(network.random.uniform(0, SPREAD_S))
        swarm.peers[number].announce(samples=1)

    for number in range(size):
        swarm.network.peers[swarm.peers[number].peer_id].tasks.append(
            asyncio.create_task(announce(number))
        )
    times = await swarm.until(lambda peer: peer.view.samples() == size, 30.0)
    found.news_s += [max(0.0, seconds - SPREAD_S) for seconds in times]
    await asyncio.sleep(0.5)
    found.news_messages += [traffic.messages for traffic in network.traffic.values()]
    found.news_bytes += [traffic.bytes for traffic in network.traffic.values()]

    network.reset()
    began = loop.time()
    await asyncio.gather(*(peer.meet(1) for peer in swarm.peers))
    found.group_s.append(loop.time() - began)
    passed = sorted(traffic.bytes for traffic in network.traffic.values())
    found.group_bytes.append((passed[len(passed) // 2], passed[-1]))

    for dead, noticed in ((network.dead, found.refused_s), (network.silent, found.silent_s)):
        victim = swarm.peers[1]
        dead.add(victim.peer_id)
        await victim.stop()
        gone = victim.peer_id
        noticed += await swarm.until(lambda peer: not peer.view.is_alive(gone), 30.0)  # noqa: B023
        await asyncio.sleep(3.0)
    watch.cancel()
    await swarm.end()


async def count_false_losses(swarm: SimulatedSwarm, found: Found) -> None:
    """Look at the views of all live peers, again and again."""
    seen: dict[bytes, set[bytes]] = {}
    looked: dict[bytes, int] = {}
    while True:
        live = {peer.peer_id for peer in swarm.peers}
        for peer in swarm.peers:
            if looked.get(peer.peer_id) != peer.changes:
                looked[peer.peer_id], alive = peer.changes, peer.view.alive_ids()
                found.wrong += len((seen.get(peer.peer_id, set()) - alive) & live)
                seen[peer.peer_id] = alive
        await asyncio.sleep(0.01)


def highest(values: list[float]) -> tuple[float, float, float]:
    """Return the largest value, as a claim's value without an interval."""
    return max(values), max(values), max(values)


def claim(text: str, values: list[float], unit: str, bound: float) -> Claim:
    """Return the claim that no value exceeds a bound."""
    return Claim(text, *highest(values), unit, bound, at_least=False)


def real_claims(size: int) -> list[Claim]:
    """Measure a swarm of real peers, print the figures and return the claims."""
    found = measure_real(size)

    def shown(key: str) -> str:
        return f"{np.median(found[key]):.2f} (most {max(found[key]):.2f})"

    print(
        f"{size} real peers: heartbeats {np.mean(found['messages']):.1f} messages, "
        f"{np.mean(found['bytes']):.0f} bytes a second; death noticed after {shown('refused')} s "
        f"(killed), {shown('silent')} s (stopped); group {shown('group')} s, round "
        f"{shown('round')} s, {found['complete'][0]:.0%} complete; "
        f"live peers taken for lost: {found['wrong'][0]:.0f}"
    )
    name = f"{size} real peers"
    return [
        claim(f"{name}: mean messages a second", [float(np.mean(found["messages"]))], "", 16.0),
        claim(f"{name}: mean bytes a second", [float(np.mean(found["bytes"]))], "", 1500.0),
        claim(f"{name}: death noticed by the last peer, killed", found["refused"], "s", 2.0),
        claim(f"{name}: death noticed by the last peer, stopped", found["silent"], "s", 5.5),
        claim(f"{name}: live peers taken for lost", found["wrong"], "", 0.0),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--real", type=int, default=16, help="real peers; 0 for none")
    arguments = parser.parse_args()
    print(conditions())
    print(
        "| peers | heartbeats: messages, bytes a second | death: refused, silent [s] "
        "| round: known [s], messages, kB | group [s] | kB of a member, of the leader | wrong |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    every: list[Found] = []
    for size in arguments.sizes:
        began, found = time.monotonic(), Found()
        for seed in range(arguments.seeds):
            loop = VirtualLoop()
            loop.run(measure(size, seed, found))
            loop.end()
        every.append(found)
        member, leader = np.median(found.group_bytes, axis=0)
        print(
            f"| {size} | {np.mean(found.messages):.1f}, {np.mean(found.bytes):.0f} "
            f"| {np.median(found.refused_s):.2f} (most {max(found.refused_s):.2f}), "
            f"{np.median(found.silent_s):.2f} (most {max(found.silent_s):.2f}) "
            f"| {np.median(found.news_s):.2f} (most {max(found.news_s):.2f}), "
            f"{np.mean(found.news_messages):.0f}, {np.mean(found.news_bytes) / 1e3:.1f} "
            f"| {max(found.group_s):.2f} | {member / 1e3:.1f}, {leader / 1e3:.1f} "
            f"| {found.wrong} |",
            flush=True,
        )
        print(f"{size} peers: {time.monotonic() - began:.0f} s of real time", file=sys.stderr)

    sizes = ", ".join(map(str, arguments.sizes))
    means = [float(np.mean(found.messages)) for found in every]
    sizes_bytes = [float(np.mean(found.bytes)) for found in every]
    refused = [seconds for found in every for seconds in found.refused_s]
    silent = [seconds for found in every for seconds in found.silent_s]
    groups = [seconds for found in every for seconds in found.group_s]
    wrong = [float(found.wrong) for found in every]
    print_claims(
        claim(f"{sizes} peers: heartbeats, mean messages a second", means, "", 16.0),
        claim(f"{sizes} peers: heartbeats, mean bytes a second", sizes_bytes, "", 1500.0),
        claim(f"{sizes} peers: death noticed by the last peer, refused", refused, "s", 2.0),
        claim(f"{sizes} peers: death noticed by the last peer, silent", silent, "s", 5.5),
        claim(f"{sizes} peers: group formed", groups, "s", 0.5),
        claim(f"{sizes} peers: live peers taken for lost", wrong, "", 0.0),
        *(real_claims(arguments.real) if arguments.real else ()),
    )


if __name__ == "__main__":
    main()
