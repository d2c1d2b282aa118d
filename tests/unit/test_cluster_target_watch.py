"""End of a replicate at its target: the mean over its peers decides, as in the results."""

from __future__ import annotations

from typing import Any

import pytest

from rayhive import events
from rayhive.cluster.replicate.peer_table import PeerTable
from rayhive.spec import Budget
from tests.fixtures.logs import make_spec

TARGET = {"metric": "accuracy", "value": 0.9, "mode": "max"}


def table(**fields: Any) -> PeerTable:
    budget = Budget(stop_at_target=True, samples_per_replicate=10_000)
    swarm = make_spec().swarm.model_copy(update={"peers": 3})
    found = PeerTable.of(make_spec(**{"budget": budget, "swarm": swarm, **fields}))
    for number, name in enumerate(found.peers):
        found.spawned(name, 100 + number, "10.0.0.1")
        ready = events.PeerReady(
            shapes=[[3]], dense_payload_bytes=12, batch_size=8, target=TARGET, data="real",
            device="cpu", processes={},
        )  # fmt: skip
        found.take(name, ready)
        found.take(name, events.TrainingStarted(round=0))
    return found


def evaluate(peers: PeerTable, round_: int, *values: float, final: bool = False) -> None:
    for name, value in zip(peers.peers, values, strict=False):
        event = events.Evaluation(round=round_, values={"accuracy": value}, final=final)
        peers.take(name, event)


def test_one_peer_at_the_target_does_not_end_training() -> None:
    peers = table()
    count = len(peers.peers)
    evaluate(peers, 8, 0.95, *[0.8] * (count - 1))
    assert peers.first_finish() is None, "the mean is below the target"
    evaluate(peers, 16, *[0.92] * (count - 1))
    assert peers.first_finish() is None, "a peer has not evaluated yet"
    evaluate(peers, 16, *[0.92] * count)
    assert peers.first_finish() == "target"
    evaluate(peers, 24, *[0.5] * count)
    assert peers.first_finish() == "target"


def test_a_peer_that_was_late_for_a_round_is_not_awaited_there() -> None:
    peers = table()
    late = list(peers.peers)[-1]
    evaluate(peers, 8, 0.92, 0.93)
    for round_, reason in ((8, None), (9, "target")):
        peers.take(late, events.Round(round=round_, samples=8, outcome="averaged"))
        assert peers.first_finish() == reason


def test_a_peer_that_is_gone_is_not_awaited() -> None:
    peers = table()
    *others, last = peers.peers
    peers.lost(last, "killed")
    evaluate(peers, 8, *[0.95] * len(others))
    assert peers.first_finish() == "target"


@pytest.mark.parametrize(
    ("fields", "final"),
    [
        ({"budget": Budget(samples_per_replicate=10_000)}, False),
        ({"trial": None, "baseline": "ddp"}, False),
        ({}, True),
    ],
)
def test_the_supervisor_ends_swarms_at_targets_only(fields: dict[str, Any], final: bool) -> None:
    peers = table(**fields)
    evaluate(peers, 8, *[0.95] * len(peers.peers), final=final)
    assert peers.first_finish() is None
