"""A peer that cannot be called goes on while the only public one has a break."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.swarm_helpers import call
from tests.integration.toy import FAST, dht_of_peer, meet_at, step_out

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

#: Round of the break, rounds of the client meanwhile, and the last round of both.
BREAK, AHEAD, LAST = 4, 4, 20
BATCH = 16


def train(folder: str, peer: int) -> dict[str, Any]:
    """Train as the public peer 0 or the client 1."""
    import torch

    from rayhive.optim.optimizer import RayhiveOptimizer

    place = Path(folder)
    dht = dht_of_peer(place, peer, client_mode=peer == 1)
    torch.manual_seed(0)
    module = torch.nn.Linear(6, 1)
    events: list[tuple[str, dict[str, Any]]] = []
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="client-ahead",
        target_batch_size=2 * BATCH,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
        on_event=lambda kind, fields: events.append((kind, dict(fields))),
        delay_state_averaging=False,
        **FAST,
    )
    generator = torch.Generator().manual_seed(peer)
    assert optimizer.tracker.wait_for_peers(2, 40)
    meet_at(place, "start", peer, 2)
    while optimizer.local_epoch < LAST:
        if peer == 0 and optimizer.local_epoch >= BREAK and not (place / "ahead-0").exists():
            step_out(optimizer)
            meet_at(place, "ahead", 0, 2)
        if peer == 1 and optimizer.local_epoch >= BREAK + AHEAD:
            (place / "ahead-1").touch()
        optimizer.begin_batch()
        inputs = torch.randn(BATCH, 6, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), inputs.sum(1, keepdim=True)).backward()
        time.sleep(0.1)
        optimizer.step(batch_size=BATCH)
    step_out(optimizer)
    meet_at(place, "end", peer, 2)
    optimizer.shutdown()
    dht.shutdown()
    return {
        "groups": {f["round"]: f.get("group_size") for kind, f in events if kind == "round"},
        "loads": [fields for kind, fields in events if kind == "state_loaded"],
        "weights": module.weight.detach().flatten().tolist(),
    }


def test_the_public_peer_follows_a_client_that_is_ahead(tmp_path: Path) -> None:
    children = [call(train, folder=str(tmp_path), peer=peer) for peer in (0, 1)]
    public, client = (child.result(120) for child in children)
    assert client["groups"][str(BREAK + 2)] != 2, "it was alone"
    for peer in (public, client):
        assert all(peer["groups"][str(round_)] == 2 for round_ in range(LAST - 4, LAST + 1)), peer
    assert not client["loads"], "its rounds are kept"
    assert public["weights"] == client["weights"]
