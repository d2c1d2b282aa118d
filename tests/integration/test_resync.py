"""After a round that failed or was partial, replicas are equal again one round later."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.swarm_helpers import call

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

PEERS, BATCH, ROUNDS = 3, 8, 12
#: In these rounds one peer drops out of the all-reduce before, or after, its part was averaged.
DROPS = {3: "before", 7: "after"}


def run_peer(
    peer: int, folder: str, addresses: list[str], delay: str, client: bool
) -> dict[str, Any]:
    import hivemind
    import torch
    from hivemind.averaging.allreduce import AllreduceException

    from rayhive.averaging.gradient_averager import RayhiveGradientAverager
    from rayhive.optim.optimizer import RayhiveOptimizer
    from rayhive.spec.axes.delay import DELAY_FLAGS

    class Dropping(RayhiveGradientAverager):
        """Peer that drops out of given rounds."""

        done = 0

        async def run_allreduce(self, *args: Any, **kwargs: Any) -> None:
            self.done += 1
            drop = DROPS.get(self.done) if peer == 1 else None
            if drop != "before":
                await super().run_allreduce(*args, **kwargs)
            if drop is not None:
                raise AllreduceException("dropped on purpose")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1))
    dht = hivemind.DHT(
        initial_peers=addresses or None,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        client_mode=client,
        use_relay=False,
        start=True,
    )
    print("ADDRESSES", *(str(address) for address in dht.get_visible_maddrs()), flush=True)
    flags = dict(DELAY_FLAGS[delay])
    recreated = flags.get("offload_optimizer", False)
    events: list[tuple[str, dict[str, Any]]] = []
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id=f"resync-{delay}",
        target_batch_size=BATCH * PEERS,
        batch_size_per_step=BATCH,
        params=list(module.parameters()) if recreated else None,
        optimizer=(lambda groups: torch.optim.SGD(groups, lr=0.05))
        if recreated
        else torch.optim.SGD(module.parameters(), lr=0.05),
        matchmaking_time=5.0,
        averaging_timeout=20.0,
        grad_averager_factory=Dropping,
        on_event=lambda kind, fields: events.append((kind, fields)),
        **{"delay_state_averaging": False, **flags},
    )
    generator = torch.Generator().manual_seed(peer)
    weights: dict[int, list[float]] = {}
    assert optimizer.tracker.wait_for_peers(PEERS, 40)
    deadline = time.monotonic() + 40
    while (round_ := optimizer.local_epoch) < ROUNDS:
        assert time.monotonic() < deadline, events
        inputs = torch.randn(BATCH, 6, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), inputs.sum(1, keepdim=True)).backward()
        optimizer.step()
        if optimizer.local_epoch > round_:
            optimizer.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
            flat = torch.cat([p.detach().flatten() for p in module.parameters()])
            weights[optimizer.local_epoch] = flat.tolist()
    optimizer.shutdown()
    dht.shutdown()
    return {
        "weights": weights,
        "outcomes": {f["round"]: f["outcome"] for kind, f in events if kind == "round"},
        "fractions": {f["round"]: f.get("fraction") for kind, f in events if kind == "round"},
        "state rounds": [(f["round"], f["reason"]) for kind, f in events if kind == "state_round"],
    }


def run(tmp_path: Path, delay: str, clients: int = 0) -> list[dict[str, Any]]:
    common = {"folder": str(tmp_path), "delay": delay}
    first = call(run_peer, peer=0, addresses=[], client=False, **common)
    _, *addresses = first.wait_for_line("ADDRESSES").split()
    others = [
        call(run_peer, peer=peer, addresses=addresses, client=peer >= PEERS - clients, **common)
        for peer in range(1, PEERS)
    ]
    return [child.result() for child in (first, *others)]


def distance(peers: list[dict[str, Any]], round_: int) -> float:
    first, *others = (peer["weights"][str(round_)] for peer in peers)
    return max(max(abs(a - b) for a, b in zip(first, other, strict=True)) for other in others)


@pytest.mark.parametrize("delay", [pytest.param("none", marks=pytest.mark.slow), "gradients"])
def test_replicas_agree_again_one_round_after_they_parted(tmp_path: Path, delay: str) -> None:
    peers = run(tmp_path, delay)
    for number, drop in DROPS.items():
        outcomes = [peer["outcomes"][str(number)] for peer in peers]
        assert outcomes[1] == "local", peers
        if drop == "before":
            # its part is missing, which the other peers report
            others = [peer["fractions"][str(number)] for peer in (peers[0], peers[2])]
            assert min(others) < 1.0 and "partial" in outcomes
        assert distance(peers, number) > 1e-4, "it applied its own gradient"
        late = 1 if delay == "none" else 2  # the wish travels with the next averaging
        for round_ in range(number + late, min(number + 4, ROUNDS)):
            assert distance(peers, round_) == 0.0, round_
    # a peer may ask once more: it learns a moment late that its parameters were averaged
    allowed = {number + more for number in DROPS for more in (1, 2, 3)}
    for peer in peers:
        averaged, reasons = zip(*peer["state rounds"], strict=True)
        assert set(averaged) <= allowed, "none without need"
        assert set(reasons) == {"failed_round"}
        assert len(peer["state rounds"]) >= len(DROPS)


def test_a_peer_that_cannot_be_called_takes_part(tmp_path: Path) -> None:
    peers = run(tmp_path, "none", clients=1)
    for peer in peers:
        averaged = [outcome for outcome in peer["outcomes"].values() if outcome == "averaged"]
        assert len(averaged) >= ROUNDS - len(DROPS) - 2, peer["outcomes"]
    assert distance(peers, ROUNDS) == 0.0
