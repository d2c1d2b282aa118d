"""Halves of a partitioned swarm train on, and lose no work when they reunite.

The peers live in network namespaces of their own, between which the routes are cut for real.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.links import Links, links
from tests.integration.swarm_helpers import Child, call

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

PEERS, BATCH = 4, 8
HALVES = ((0, 1), (2, 3))


def enter_namespace(pid: int) -> None:
    with open(f"/proc/{pid}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def run_peer(
    peer: int, namespace: int, host: str, addresses: list[str], pace_s: float, folder: str
) -> dict[str, Any]:
    enter_namespace(namespace)
    import hivemind
    import torch

    from rayhive.optim.optimizer import RayhiveOptimizer
    from rayhive.strategy.dht import dial_from_own_ports

    dial_from_own_ports()  # as a study's peers do
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1))
    dht = hivemind.DHT(
        initial_peers=addresses or None,
        host_maddrs=[f"/ip4/{host}/tcp/0"],
        use_relay=False,
        start=True,
    )
    print("ADDRESSES", *(str(address) for address in dht.get_visible_maddrs()), flush=True)
    events: list[dict[str, Any]] = []

    def on_event(kind: str, fields: dict[str, Any]) -> None:
        events.append({"kind": kind, "t": time.time(), **fields})
        if kind == "round":
            print(f"ROUND {fields['round']} of {fields.get('group_size', 1)}", flush=True)
        elif kind == "state_round":
            print(f"AVERAGED {fields['round']}", flush=True)

    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="parted",
        target_batch_size=BATCH * PEERS,
        batch_size_per_step=BATCH,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.05),
        matchmaking_time=30.0,
        averaging_timeout=60.0,
        on_event=on_event,
        delay_state_averaging=False,
    )
    generator = torch.Generator().manual_seed(peer)
    weights: dict[int, list[float]] = {}
    known: dict[int, int] = {}
    assert optimizer.tracker.wait_for_peers(PEERS, 40)
    deadline = time.monotonic() + 150
    while not (Path(folder) / "stop").exists():
        assert time.monotonic() < deadline, "nobody stopped it"
        round_ = optimizer.local_epoch
        time.sleep(pace_s)
        inputs = torch.randn(BATCH, 6, generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(module(inputs), inputs.sum(1, keepdim=True))
        (loss * (1e-3 if (Path(folder) / "gently").exists() else 1.0)).backward()
        optimizer.step()
        if optimizer.local_epoch > round_:
            flat = torch.cat([p.detach().flatten() for p in module.parameters()])
            weights[optimizer.local_epoch] = flat.tolist()
            known[optimizer.local_epoch] = dht.run_coroutine(_known)
    optimizer.shutdown()
    dht.shutdown()
    kept = ("kind", "t", "round", "round_before", "outcome", "group_size", "apart", "reason")
    told = [{key: event[key] for key in kept if key in event} for event in events]
    return {"weights": weights, "events": told, "known": known}


async def _known(dht: Any, node: Any) -> int:
    return len(node.protocol.routing_table.peer_id_to_uid)


def route(net: Links, peer: int, do: str, others: Sequence[int]) -> None:
    lines = "\n".join(f"route {do} blackhole {net.hosts[other]}/32" for other in others)
    command = [*net.launchers[peer], "ip", "-batch", "-"]
    subprocess.run(command, input=lines + "\n", text=True, check=True)


def cut(net: Links) -> None:
    for half, others in (HALVES, HALVES[::-1]):
        for peer in half:
            route(net, peer, "add", others)


def heal(net: Links) -> None:
    for half, others in (HALVES, HALVES[::-1]):
        for peer in half:
            route(net, peer, "del", others)


@contextlib.contextmanager
def network() -> Iterator[Links]:
    if os.geteuid():
        pytest.skip("only root may make network namespaces")
    with links(PEERS, rate_mbit=200.0) as net:
        if not net.shaped:
            pytest.skip("this machine makes no network namespaces")
        yield net


def rounds_of(child: Child, size: int) -> int:
    return child.log().count(f" of {size}\n")


def wait_for_rounds(children: Sequence[Child], size: int, more: int, limit: float = 120.0) -> float:
    """Wait until each has done so many more rounds in a group of a size; return how long [s]."""
    began = time.monotonic()
    before = [rounds_of(child, size) for child in children]
    while any(
        rounds_of(child, size) < count + more for child, count in zip(children, before, strict=True)
    ):
        assert all(child.is_alive() for child in children), [c.end_of_log() for c in children]
        assert time.monotonic() - began < limit, [c.end_of_log() for c in children]
        time.sleep(0.05)
    return time.monotonic() - began


def wait_for_equal_replicas(
    children: Sequence[Child], size: int, more: int, limit: float = 60.0
) -> None:
    """Wait until each has done so many rounds in a group of a size since its last averaging."""
    deadline = time.monotonic() + limit
    while any(
        child.log().rpartition("AVERAGED ")[2].count(f" of {size}\n") < more for child in children
    ):
        assert all(child.is_alive() for child in children), [c.end_of_log() for c in children]
        assert time.monotonic() < deadline, [c.end_of_log() for c in children]
        time.sleep(0.05)


class Swarm:
    """Peers in namespaces; the first half computes much faster than the other."""

    def __init__(self, net: Links, folder: Path) -> None:
        self.net, self.folder = net, folder
        self.children: dict[int, Child] = {}

    def start(self, peer: int, addresses: Sequence[str]) -> list[str]:
        """Start a peer; return its addresses."""
        self.children[peer] = child = call(
            run_peer,
            peer=peer,
            namespace=int(self.net.launchers[peer][1].split("/")[2]),
            host=self.net.hosts[peer],
            addresses=list(addresses),
            pace_s=0.02 if peer in HALVES[0] else 0.2,
            folder=str(self.folder),
        )
        return child.wait_for_line("ADDRESSES").split()[1:]

    def wait(self, size: int, more: int) -> float:
        return wait_for_rounds([self.children[peer] for peer in range(PEERS)], size, more)

    def go_on_gently(self) -> None:
        """Make later steps so small that what changes parameters is their averaging."""
        (self.folder / "gently").touch()
        self.wait(2, more=2)

    def results(self) -> list[dict[str, Any]]:
        (self.folder / "stop").touch()
        return [self.children[peer].result(60) for peer in range(PEERS)]


def of_kind(peer: dict[str, Any], kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [
        event
        for event in peer["events"]
        if event["kind"] == kind and all(event.get(k) == v for k, v in fields.items())
    ]


def assert_one_swarm(peers: list[dict[str, Any]], since: int) -> None:
    """The replicas agree from a round on, and the DHT of each peer knows all others."""
    common = set.intersection(*({int(r) for r in peer["weights"]} for peer in peers))
    assert max(common) >= since + 1
    for round_ in sorted(r for r in common if r >= since):
        first, *others = (peer["weights"][str(round_)] for peer in peers)
        for other in others:
            assert first == other, round_
    # not after the last round: a peer that has left is soon forgotten
    for peer in peers:
        assert max(peer["known"][str(round_)] for round_ in common if round_ >= since) == PEERS - 1


@pytest.mark.parametrize("rounds", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_a_healed_partition_loses_no_training(tmp_path: Path, rounds: int) -> None:
    with network() as net:
        swarm = Swarm(net, tmp_path)
        addresses = swarm.start(0, [])
        for peer in range(1, PEERS):
            swarm.start(peer, addresses)
        swarm.wait(4, more=4)
        cut(net)
        noticed = swarm.wait(2, more=1)
        parted = swarm.wait(2, more=rounds)
        swarm.go_on_gently()
        heal(net)
        healed = time.time()
        reunited = swarm.wait(4, more=4)
        # averagings end: the replicas are soon equal, and remain it
        wait_for_equal_replicas(list(swarm.children.values()), 4, more=6)
        peers = swarm.results()
    print(f"the halves went on {noticed:.1f} s after the cut, were apart for "
          f"{noticed + parted:.0f} s and together again after {reunited:.1f} s")  # fmt: skip

    joint = [e for e in of_kind(peers[0], "state_round", group_size=4) if e["t"] > healed]
    merged = next(int(e["round"]) for e in joint if e["outcome"] == "averaged")
    # a peer of a group may have heard of the others' return a moment after it asked for the group
    assert joint[0]["reason"] in ("partition", "replicas_differ")
    for peer in peers:
        apart = [e for e in of_kind(peer, "state_round") if e["t"] < healed]
        assert {e["reason"] for e in apart} <= {"joined", "failed_round"}, "halves need none"
    assert_one_swarm(peers, max(int(e["round"]) for e in joint if e["outcome"] == "averaged"))
    assert not any(of_kind(peer, "state_loaded") for peer in peers), "no peer discarded its work"
    # the peers with fewer rounds go on at the round of the others, with their own parameters
    reunions = [of_kind(peer, "reunited") for peer in peers]
    assert not any(reunions[:2]) and all(reunions[2:])
    # they do it once more if the others have gone on before all were in one group
    first, told = reunions[2][0], reunions[2][-1]
    split = first["round_before"] - first["apart"]
    assert all(e["apart"] >= rounds for each in reunions for e in each)
    assert first["round"] > first["round_before"] + 2
    # and in the next averaging the parameters of each half count for the rounds that it did
    import torch

    replicas = [{int(r): torch.tensor(w) for r, w in p["weights"].items()} for p in peers]
    last = [replica[max(r for r in replica if r < merged)] for replica in replicas]
    fast, slow = (torch.stack(last[:2]).mean(0), torch.stack(last[2:]).mean(0))
    share = float((replicas[0][merged] - slow) @ (fast - slow) / (fast - slow).square().sum())
    done = told["round"] - split
    mixed = [e for p in peers for e in of_kind(p, "state_round")]
    mixed = [e for e in mixed if e["t"] > healed and e["round"] <= merged]
    if all(e["outcome"] == "averaged" for e in mixed):  # no incomplete one had mixed them before
        assert share == pytest.approx(done / (done + told["apart"]), abs=0.02), (share, told)
    else:
        assert 0 < share < 1


@pytest.mark.slow
def test_two_swarms_that_began_with_the_same_addresses_become_one(tmp_path: Path) -> None:
    with network() as net:
        swarm = Swarm(net, tmp_path)
        cut(net)
        addresses = [*swarm.start(0, []), *swarm.start(2, [])]
        for peer in (1, 3):
            swarm.start(peer, addresses)
        heal(net)
        swarm.wait(4, more=2)
        peers = swarm.results()
    assert_one_swarm(peers, since=1)
