"""Real peers average their parameters when they must, tell why, and do not without a reason."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.swarm_helpers import Child, call

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

PEERS, BATCH = 3, 8


def digest(tensors: Any) -> str:
    """Return a hash of every bit of some tensors."""
    content = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()[:8]


def run_peer(
    peer: int,
    addresses: list[str],
    folder: str,
    rounds: int,
    together: int,
    changes: dict[str, float],
    optimizer: str,
) -> dict[str, Any]:
    """Train until all have reached a round.

    Args:
        peer: Number of the peer.
        addresses: Addresses of the first peer.
        folder: Folder in which peers say that they have reached the last round.
        rounds: Rounds in a group of all to do.
        together: Peers that begin together.
        changes: Round -> relative change of this peer's parameters after it.
        optimizer: ``sgd`` with momentum, or ``adam``.
    """
    import hivemind
    import torch

    from rayhive.optim.optimizer import RayhiveOptimizer

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
    inner: torch.optim.Optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    if optimizer == "sgd":
        inner = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    swarm = RayhiveOptimizer(
        dht=dht,
        run_id="reasons",
        target_batch_size=BATCH * PEERS,
        batch_size_per_step=BATCH,
        optimizer=inner,
        matchmaking_time=10.0,
        averaging_timeout=30.0,
        on_event=lambda kind, fields: events.append((kind, fields)),
        delay_state_averaging=False,
    )
    generator = torch.Generator().manual_seed(peer)
    digests: dict[int, dict[str, str]] = {}
    joint = 0
    assert swarm.tracker.wait_for_peers(together, 40)
    deadline = time.monotonic() + 60
    while len(list(Path(folder).glob("done-*"))) < PEERS:
        assert time.monotonic() < deadline, events
        round_ = swarm.local_epoch
        time.sleep(0.01)
        inputs = torch.randn(BATCH, 6, generator=generator)
        swarm.zero_grad()
        torch.nn.functional.mse_loss(module(inputs), inputs.sum(1, keepdim=True)).backward()
        swarm.step()
        if swarm.local_epoch > round_:
            state = swarm.state_averager.optimizer.state
            names = sorted(set().union(*state.values()))
            groups = {name: [each[name] for each in state.values()] for name in names}
            groups["parameters"] = list(module.parameters())
            digests[swarm.local_epoch] = {name: digest(group) for name, group in groups.items()}
            print("ROUND", swarm.local_epoch, flush=True)
            last = next((f for kind, f in reversed(events) if kind == "round"), {})
            joint += last.get("group_size") == PEERS
            if joint == rounds:
                (Path(folder) / f"done-{peer}").touch()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.mul_(1 + changes.get(str(swarm.local_epoch), 0.0))
    swarm.shutdown()
    dht.shutdown()
    return {
        "digests": digests,
        "averaged": [
            (f["round"], f["reason"], f["outcome"]) for kind, f in events if kind == "state_round"
        ],
        "joint": [f["round"] for kind, f in events if f.get("group_size") == PEERS],
    }


def start(folder: Path, peer: int, addresses: list[str], **options: Any) -> Child:
    given = {"rounds": 12, "together": PEERS, "changes": {}, "optimizer": "sgd", **options}
    return call(run_peer, peer=peer, addresses=addresses, folder=str(folder), **given)


def differing(told: list[dict[str, Any]]) -> list[int]:
    """Return the rounds after which replicas differ by as little as a bit."""
    common = set.intersection(*({int(number) for number in peer["digests"]} for peer in told))
    first, *others = ({n: peer["digests"][str(n)] for n in common} for peer in told)
    return sorted(n for n in common if any(other[n] != first[n] for other in others))


def test_replicas_that_differ_are_averaged_beyond_a_tolerance(tmp_path: Path) -> None:
    """A first difference counts whatever its size; later ones count beyond rounding."""
    first = start(tmp_path, 0, [])
    _, *addresses = first.wait_for_line("ADDRESSES").split()
    changes = {"3": 3e-7, "4": 3e-7, "6": 1e-3}
    others = [start(tmp_path, 1, addresses, changes=changes), start(tmp_path, 2, addresses)]
    told = [child.result() for child in (first, *others)]
    for peer in told:
        assert peer["averaged"] == [[n, "replicas_differ", "averaged"] for n in (4, 7)], told
    assert differing(told) == [5, 6], told


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_peer_that_joins_makes_the_others_average_once(tmp_path: Path, optimizer: str) -> None:
    """Statistics are averaged, too: different moments would drive the replicas apart again."""
    options: dict[str, Any] = {"rounds": 8, "together": 2, "optimizer": optimizer}
    first = start(tmp_path, 0, [], **options)
    _, *addresses = first.wait_for_line("ADDRESSES").split()
    second = start(tmp_path, 1, addresses, **options)
    second.wait_for_line("ROUND 4")
    joiner = start(tmp_path, 2, addresses, **options)
    told = [child.result() for child in (first, second, joiner)]
    met = min(told[2]["joint"])
    for peer in told:
        company = [entry for entry in peer["averaged"] if entry[0] >= met]
        assert company and {tuple(entry[1:]) for entry in company} == {("joined", "averaged")}, told
        assert max(number for number, *_ in company) <= met + 1, told
    settled = max(number for number, *_ in told[2]["averaged"])
    late = [n for n in differing(told) if n >= settled]
    assert not late, [peer["digests"][str(late[0])] for peer in told]
    # a newcomer on a busy machine may make a round fail before it is in one
    earlier = {reason for number, reason, _ in told[0]["averaged"] if number < met}
    assert earlier <= {"joined", "failed_round"}, "two peers that go on are equal"
