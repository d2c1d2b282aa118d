"""Copies of a model in the processes of a peer, counted in pages after some rounds."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.integration.swarm_helpers import call

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

PEERS, ROUNDS = 2, 4
#: Samples of a batch of each peer.
BATCHES = (4, 12)
#: Round before which one peer changes its parameters, so that all have to be averaged.
DISTURBED = 2


def run_peer(peer: int, addresses: list[str]) -> dict[str, Any]:
    """Train a peer; return its parameters, its events and the pages that each process holds."""
    import torch

    from rayhive.averaging.gradient_averager import accumulated
    from rayhive.optim.child_processes import ChildProcesses
    from rayhive.optim.optimizer import RayhiveOptimizer
    from tests.pages import held, whole_pages

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = torch.nn.Linear(300, 500, bias=False)
    children = ChildProcesses()
    dht = children.start_dht(
        initial_peers=addresses or None, host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False
    )
    print("ADDRESSES", *(str(address) for address in dht.get_visible_maddrs()), flush=True)
    events: list[tuple[str, dict[str, Any]]] = []
    adam = torch.optim.Adam(module.parameters(), lr=0.01)
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="memory",
        target_batch_size=sum(BATCHES),
        batch_size_per_step=BATCHES[peer],
        optimizer=adam,
        delay_state_averaging=False,
        on_event=lambda kind, fields: events.append((kind, fields)),
    )
    assert optimizer.grad_averager is not None
    assert optimizer.tracker.wait_for_peers(PEERS, 60)
    generator = torch.Generator().manual_seed(peer)
    deadline = time.monotonic() + 60
    while (round_ := optimizer.local_epoch) < ROUNDS:
        assert time.monotonic() < deadline, events
        module.zero_grad(set_to_none=False)
        module(torch.randn(BATCHES[peer], 300, generator=generator)).square().mean().backward()
        if peer == 1 and round_ == DISTURBED:
            with torch.no_grad():
                module.weight[0, 0] += 1
        optimizer.step()
    with (
        optimizer.grad_averager.get_tensors() as averaged,
        optimizer.state_averager.get_tensors() as copied,
    ):
        kinds = {
            "parameters": list(module.parameters()),
            "gradients": [p.grad for p in module.parameters() if p.grad is not None],
            "statistics": [v for s in adam.state.values() for v in s.values() if v.numel() > 1],
            "sums of gradients": accumulated(optimizer.grad_averager)[0],
            "averaged gradients": averaged,
            "copies for an averaging": [tensor for tensor in copied if tensor.numel() > 1],
        }
        pages = {kind: [whole_pages(each) for each in tensors] for kind, tensors in kinds.items()}
        found = {
            role: {kind: held(each, pid) for kind, each in pages.items()}
            for role, pid in optimizer.processes.items()
        }
    optimizer.shutdown()
    children.end_dht(dht)
    return {
        "pages": {kind: sum(map(len, each)) for kind, each in pages.items()},
        "bytes": {kind: sum(t.nbytes for t in tensors) for kind, tensors in kinds.items()},
        "found": found,
        "weights": module.weight.flatten().tolist(),
        "reasons": [fields["reason"] for kind, fields in events if kind == "state_round"],
        "outcomes": [fields["outcome"] for kind, fields in events if kind == "round"],
    }


def test_each_process_holds_only_the_copies_that_it_reads() -> None:
    """The gradients' averager was forked last: its parent had all of them by then."""
    first = call(run_peer, peer=0, addresses=[])
    _, *addresses = first.wait_for_line("ADDRESSES").split()
    second = call(run_peer, peer=1, addresses=addresses)
    peers = [first.result(), second.result()]
    assert peers[0]["weights"] == peers[1]["weights"]
    for peer in peers:
        assert peer["outcomes"] == ["averaged"] * ROUNDS
        assert peer["reasons"] == ["replicas_differ"]
        copies = {kind: size / (4 * 300 * 500) for kind, size in peer["bytes"].items()}
        assert copies == {
            "parameters": 1,
            "gradients": 1,
            "statistics": 2,
            "sums of gradients": 1,
            "averaged gradients": 1,
            "copies for an averaging": 3,
        }
        full, found = peer["pages"], peer["found"]
        assert found["trainer"] == {**full, "copies for an averaging": 0}
        nothing = dict.fromkeys(full, 0)
        shared = full["averaged gradients"]
        assert found["gradient_averager"] == {**nothing, "averaged gradients": shared}
        assert found["dht"]["parameters"] == 0
        for kind in ("parameters", "statistics", "copies for an averaging"):
            assert found["state_averager"][kind] == 0
