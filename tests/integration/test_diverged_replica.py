"""A replica whose parameters are not finite is refused by the other peers, and replaced."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest

from tests.integration.swarm_helpers import call

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

PEERS, BATCH, ROUNDS, DIVERGED = 3, 8, 30, 4


def fail_once_when_excluded() -> None:
    """Let the first all-reduce that this process is excluded from end before it begins."""
    from rayhive.averaging.allreduce import MeasuredAllReduce

    run, failed = MeasuredAllReduce.run, []

    async def failing(self: Any) -> Any:
        at = self.sender_peer_ids.index(self.peer_id)
        if at in self.tensor_part_reducer.excluded and not failed:
            failed.append(at)
            raise RuntimeError("the link is gone")
        async for change in run(self):
            yield change

    MeasuredAllReduce.run = failing  # type: ignore[method-assign]


def run_peer(peer: int, addresses: list[str], delay: str) -> dict[str, Any]:
    import hivemind
    import torch

    from rayhive.optim.optimizer import RayhiveOptimizer
    from rayhive.spec.axes.delay import DELAY_FLAGS

    offload = {"offload_optimizer": True} if delay == "none, offloaded" else {}
    if offload:
        fail_once_when_excluded()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.ReLU(), torch.nn.Linear(40, 1))
    dht = hivemind.DHT(
        initial_peers=addresses or None,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        use_relay=False,
        start=True,
    )
    print("ADDRESSES", *(str(address) for address in dht.get_visible_maddrs()), flush=True)
    events: list[tuple[str, dict[str, Any]]] = []
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id=f"diverged-{delay}",
        target_batch_size=BATCH * PEERS,
        batch_size_per_step=BATCH,
        params=list(module.parameters()) if offload else None,
        optimizer=(lambda groups: torch.optim.Adam(groups, lr=0.01))
        if offload
        else torch.optim.Adam(module.parameters(), lr=0.01),
        matchmaking_time=5.0,
        averaging_timeout=20.0,
        on_event=lambda kind, fields: events.append((kind, fields)),
        **{"delay_state_averaging": False, **DELAY_FLAGS[delay.split(",")[0]], **offload},
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
        if peer == 1 and round_ == DIVERGED - 1:
            with torch.no_grad():
                optimizer.opt.param_groups[0]["params"][0].fill_(math.nan)
        optimizer.step()
        if optimizer.local_epoch > round_:
            optimizer.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
            flat = torch.cat([p.detach().flatten() for p in module.parameters()])
            weights[optimizer.local_epoch] = flat.tolist()
    moments = [s["exp_avg"].norm().item() for s in optimizer.opt.state.values()]
    optimizer.shutdown()
    dht.shutdown()
    refused = [f for kind, f in events if kind == "rejected"]
    loaded = sum(kind == "state_loaded" for kind, _ in events)
    together = [
        f["round"]
        for kind, f in events
        if kind == "state_round" and (f["outcome"], f["group_size"]) == ("averaged", PEERS)
    ]
    return {
        "id": str(dht.peer_id),
        "weights": weights,
        "refused": refused,
        "loaded": loaded,
        "moments": moments,
        "together": together,
    }


@pytest.mark.parametrize(
    "delay",
    ["none", *(pytest.param(d, marks=pytest.mark.slow) for d in ("state", "none, offloaded"))],
)
def test_parameters_that_are_not_finite_are_refused_and_replaced(delay: str) -> None:
    first = call(run_peer, peer=0, addresses=[], delay=delay)
    _, *addresses = first.wait_for_line("ADDRESSES").split()
    others = [call(run_peer, peer=p, addresses=addresses, delay=delay) for p in (1, 2)]
    peers = [child.result() for child in (first, *others)]
    broken = peers[1]
    for peer in (peers[0], peers[2]):  # no zeros of the third were averaged with theirs
        norms = [math.hypot(*peer["weights"][str(r)]) for r in range(1, DIVERGED + 5)]
        assert all(after > 0.9 * before for before, after in itertools.pairwise(norms)), norms
    if "offloaded" in delay:  # its round failed, and left it what it had until they met again
        assert not all(map(math.isfinite, broken["weights"][str(DIVERGED)]))
        met = min(round_ for round_ in broken["together"] if round_ > DIVERGED)
        broken["weights"] = {r: w for r, w in broken["weights"].items() if int(r) >= met}
    for peer in peers:
        seen = {(f["offender"], f["reason"]) for f in peer["refused"]}
        assert seen == {(broken["id"], "not_finite")}
        assert all(map(math.isfinite, peer["moments"]))
        assert all(map(math.isfinite, (x for w in peer["weights"].values() for x in w)))
    last = max(set.intersection(*(set(peer["together"]) for peer in peers)))
    assert last > DIVERGED, "they went on together"
    one, *rest = (peer["weights"][str(last)] for peer in peers)
    for each in rest:
        assert max(abs(a - b) for a, b in zip(one, each, strict=True)) < 1e-5
    assert broken["loaded"] >= 1, "its optimizer's statistics came from another peer"
