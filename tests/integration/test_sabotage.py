"""Real peers that are corrupt from within: they are refused and named, and nobody else is hurt."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from rayhive.config import Budget, Configuration, Evaluation, SwarmConfig, WorkloadConfig
from rayhive.peer.sketch import relative_distance
from rayhive.plan import At, PlannedFault
from rayhive.spec import PeerSpec
from tests.integration.zygote_harness import PeerLine, finish_swarm, start_swarm, zygote

pytestmark = [pytest.mark.swarm]

PEERS, ROUNDS, TARGET = 3, 9, 96
NAN_IN, SCALED_IN = 3, 6
POWERSGD = {"powersgd_rank": 2, "min_compression_ratio": 0.2}


@pytest.fixture(scope="module")
def socket_path() -> Iterator[str]:
    with zygote() as path:
        yield path


def fault(number: int, kind: str, at: int, peer: int = 1, **args: Any) -> PlannedFault:
    return PlannedFault(
        id=f"f{number}", kind=kind, who=(f"peer-{peer}",), at=At(round=at), args=args
    )


def specs(
    run_id: str, faults: tuple[PlannedFault, ...], peers: int = PEERS, **settings: Any
) -> list[PeerSpec]:
    return [
        PeerSpec(
            run_id=run_id,
            peer=peer,
            peers=peers,
            seed=3,
            faults=tuple(f for f in faults if f"peer-{peer}" in f.who),
            workload=WorkloadConfig(name="digits"),
            swarm=SwarmConfig(peers=peers, target_batch_size=TARGET, batch_size=16),
            configuration=Configuration(**settings),
            budget=Budget(seconds_per_replicate=60, samples_per_replicate=ROUNDS * TARGET),
            evaluation=Evaluation(every_samples=100 * TARGET),
            accelerator="cpu",
        )
        for peer in range(peers)
    ]


def identity(line: PeerLine) -> str:
    return str(line.of("dht_ready")[0]["peer_id"])


def assert_books_balance(line: PeerLine) -> None:
    """Computed samples are those that entered rounds, and those that are said to be lost."""
    entered = lost = 0
    for event in sorted(line.of("round"), key=lambda event: int(event["round"])):
        entered, lost = entered + event["samples"], lost + event["lost"]
        assert event["computed"] == entered + lost


def assert_replicas_agree(lines: list[PeerLine], tolerance: float = 1e-5) -> None:
    told = [{e["round"]: e for e in line.of("weights")} for line in lines]
    for a, b in combinations(told, 2):
        for round_ in a.keys() & b.keys():
            assert a[round_]["finite"] and b[round_]["finite"]
            sketches = [(each[round_]["norm"], each[round_]["sketch"]) for each in (a, b)]
            distance = relative_distance(*sketches[0], *sketches[1])
            assert distance <= tolerance, f"round {round_}: {distance}"


@pytest.mark.parametrize(
    "settings", [{}, {"delay": "gradients"}, POWERSGD], ids=["plain", "delayed", "powersgd"]
)
def test_corrupt_gradients_are_refused_by_everybody_and_the_offender_is_named(
    socket_path: str, tmp_path: Path, settings: dict[str, Any]
) -> None:
    faults = (fault(0, "nan_gradient", NAN_IN), fault(1, "scaled_gradient", SCALED_IN))
    lines = start_swarm(socket_path, specs("corrupt", faults, **settings), tmp_path)
    finish_swarm(lines)
    offender = lines[1]
    assert [e["round"] for e in offender.of("sabotaged")] == [NAN_IN, SCALED_IN]
    for line in lines:
        refusals = [(e["round"], e["offender"], e["reason"]) for e in line.of("rejected")]
        assert refusals == [
            (NAN_IN, identity(offender), "not_finite"),
            (SCALED_IN, identity(offender), "norm"),
        ], line.story()
        large = line.of("rejected")[1]
        assert large["norm"] > large["bound"] > 0
        assert {e["outcome"] for e in line.of("round")} == {"averaged"}, line.story()
        assert_books_balance(line)
        losses = [e["values"]["loss"] for e in line.of("evaluation")]
        assert losses[-1] < 2.3, "it has learned"
    for event in offender.of("round"):
        assert (event["samples"] == 0) == (event["round"] in (NAN_IN, SCALED_IN))
    assert_replicas_agree(lines, 1e-2 if settings is POWERSGD else 1e-5)


def test_of_two_peers_the_one_that_is_corrupt_is_refused(socket_path: str, tmp_path: Path) -> None:
    faults = (
        fault(0, "scaled_gradient", 1, rounds=2),
        fault(1, "nan_gradient", 5),
        fault(2, "nan_gradient", 5, peer=0),
    )
    lines = start_swarm(socket_path, specs("pair", faults, peers=2), tmp_path)
    finish_swarm(lines)
    _, second = lines
    for line in lines:
        seen = {(e["round"], e["offender"], e["reason"]) for e in line.of("rejected")}
        assert {(1, identity(second), "norm"), (2, identity(second), "norm")} <= seen
        outcomes = {e["round"]: e["outcome"] for e in line.of("round")}
        assert outcomes.pop(5) == "skipped", "nobody had a gradient that is a number"
        assert set(outcomes.values()) == {"averaged"}, line.story()
        assert_books_balance(line)
    assert_replicas_agree(lines)
