"""Halves of a swarm that lose sight of each other go on, find each other again and lose nothing.

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
from tests.integration.swarm_helpers import Child, call, forks  # noqa: F401

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

    from rayhive.peer.optimizer import RayhiveOptimizer

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
    assert optimizer.tracker.wait_for_peers(PEERS, 40)
    deadline = time.monotonic() + 100
    while not (Path(folder) / "stop").exists():
        assert time.monotonic() < deadline, "nobody stopped it"
        round_ = optimizer.local_epoch
        time.sleep(pace_s)
        inputs = torch.randn(BATCH, 6, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        if optimizer.local_epoch > round_:
            flat = torch.cat([p.detach().flatten() for p in module.parameters()])
            weights[optimizer.local_epoch] = flat.tolist()
    known = dht.run_coroutine(_known)
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


def wait_for_rounds(children: Sequence[Child], size: int, more: int, limit: float = 60.0) -> float:
    """Wait until each has done so many more rounds in a group of a size; return how long [s]."""
    began = time.monotonic()
    before = [rounds_of(child, size) for child in children]
    while any(
        rounds_of(child, size) < count + more for child, count in zip(children, before, strict=True)
    ):
        assert all(child.is_alive() for child in children), [c.log()[-2000:] for c in children]
        assert time.monotonic() - began < limit, [c.log()[-2000:] for c in children]
        time.sleep(0.05)
    return time.monotonic() - began


def test_a_healed_partition_loses_no_training(tmp_path: Path) -> None:
    with network() as net:

        def start(peer: int, addresses: list[str]) -> Child:
            return call(
                run_peer,
                peer=peer,
                namespace=int(net.launchers[peer][1].split("/")[2]),
                host=net.hosts[peer],
                addresses=addresses,
                pace_s=0.03 if peer in HALVES[0] else 0.06,
                folder=str(tmp_path),
            )

        first = start(0, [])
        _, *addresses = first.wait_for_line("ADDRESSES").split()
        children = [first, *(start(peer, addresses) for peer in range(1, PEERS))]
        try:
            wait_for_rounds(children, 4, 4)
            cut(net)
            noticed = wait_for_rounds(children, 2, 1)
            wait_for_rounds(children, 2, 20)
            heal(net)
            healed = time.time()
            reunited = wait_for_rounds(children, 4, 4)
        finally:
            (tmp_path / "stop").touch()
        peers = [child.result(60) for child in children]
    print(f"the halves went on after {noticed:.1f} s and were together after {reunited:.1f} s")
    print([len(peer["events"]) for peer in peers])
    for number, peer in enumerate(peers):
        after = [e for e in peer["events"] if e["t"] > healed - 1]
        print(number, [tuple(v for k, v in e.items() if k != "t") for e in after][:16])
    Path("/tmp/partition.json").write_text(__import__("json").dumps([peers, healed]))
