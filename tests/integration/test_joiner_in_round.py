"""A peer joins while others average the parameters of a round whose gradients it has missed.

It has the state of the round before, as its download began earlier.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.integration.swarm_helpers import call
from tests.integration.toy import FAST, dht_of_peer, meet_at, stay_in_rounds, step_out

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

#: Round in which the last peer joins, and the last round.
JOINED_IN, LAST = 4, 8
BATCH = 16
#: Longest time of the test [s]; a peer that does not come is awaited for longer.
LIMIT, WINDOW = 60.0, 120.0
#: Two peers that train, and the one that joins them.
PEERS, JOINER = 3, 2


def train(folder: str, peer: int) -> dict[str, Any]:
    """Train; peer 1 waits in one round between the averaging of gradients and of parameters."""
    import torch

    from rayhive.optim.optimizer import RayhiveOptimizer

    stay_in_rounds()
    place, events = Path(folder), list[tuple[str, dict[str, Any]]]()

    def note(kind: str, fields: dict[str, Any]) -> None:
        """Keep an event; in one round, let peer 1 go on once all know the joiner."""
        events.append((kind, dict(fields)))
        if (peer, kind, fields.get("round")) == (1, "round", JOINED_IN):
            meet_at(place, "in-round", peer, 2)
            know_all()
            meet_at(place, "known", peer, PEERS)

    def know_all() -> None:
        """Wait until this peer knows all peers, and the joiner which round the others are in."""
        swarm = optimizer.tracker.swarm
        assert swarm.wait_for_peers(PEERS, LIMIT)
        assert peer != JOINER or swarm.wait_until_met(JOINED_IN, LIMIT)
        (place / f"known-{peer}").touch()

    dht = dht_of_peer(place, peer)
    torch.manual_seed(0)
    module = torch.nn.Linear(6, 1)
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="in-round",
        target_batch_size=2 * BATCH,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
        on_event=note,
        delay_state_averaging=False,
        average_state_every=1,
        **{**FAST, "matchmaking_time": WINDOW, "averaging_timeout": WINDOW},
    )
    generator = torch.Generator().manual_seed(peer)
    if peer == 0:  # it will be in the round
        threading.Thread(target=know_all, daemon=True).start()
    if peer == JOINER:
        meet_at(place, "before", peer, 2)
        download = optimizer.state_averager.load_state_from_peers

        def end_in_round(**options: Any) -> None:
            download(**options)
            meet_at(place, "loaded", peer, 2)
            meet_at(place, "in-round", peer, 2)

        optimizer.state_averager.load_state_from_peers = end_in_round
        optimizer.load_state_from_peers()
        know_all()
    else:
        assert optimizer.tracker.wait_for_peers(PEERS - 1, LIMIT)
        meet_at(place, "start", peer, PEERS - 1)
    while optimizer.local_epoch < LAST:
        if peer == 1 and optimizer.local_epoch == JOINED_IN - 1:
            meet_at(place, "before", peer, 2)
            meet_at(place, "loaded", peer, 2)
        optimizer.begin_batch()
        inputs = torch.randn(BATCH, 6, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step(batch_size=BATCH)
    step_out(optimizer)
    meet_at(place, "end", peer, PEERS)
    optimizer.shutdown()
    dht.shutdown()
    return {
        "sizes": {f["round"]: f.get("group_size") for kind, f in events if kind == "state_round"},
        "weights": module.weight.detach().flatten().tolist(),
    }


def test_the_round_goes_on_without_a_peer_that_waits_for_its_end(tmp_path: Path) -> None:
    children = [call(train, folder=str(tmp_path), peer=peer) for peer in range(PEERS)]
    told = [child.result(LIMIT) for child in children]
    for peer in told[:JOINER]:
        assert peer["sizes"][str(JOINED_IN)] == PEERS - 1
        assert peer["sizes"][str(LAST)] == PEERS
    assert told[0]["weights"] == told[1]["weights"] == told[2]["weights"]
