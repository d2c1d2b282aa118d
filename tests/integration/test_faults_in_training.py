"""Faults inside real peers: corrupt tensors are refused and their sender is named."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from rayhive.averaging.outlier_filter import LEANING
from rayhive.spec import Budget
from rayhive.spec.fault_plan import At, PlannedFault
from rayhive.spec.replicate import PeerSpec
from tests.integration.forkserver_harness import (
    PeerLine,
    digits_peers,
    finish_swarm,
    start_swarm,
)
from tests.integration.test_liveness import listen, rounds, stop

pytestmark = [pytest.mark.swarm]

PEERS, ROUNDS, TARGET = 3, 9, 96
NAN_IN, SCALED_IN = 3, 6
POWERSGD = {"powersgd_rank": 2, "min_compression_ratio": 0.2}


def fault(number: int, kind: str, at: int, peer: int = 1, **args: Any) -> PlannedFault:
    return PlannedFault(
        id=f"f{number}", kind=kind, who=(f"peer-{peer}",), at=At(round=at), args=args
    )


def specs(
    run_id: str,
    faults: tuple[PlannedFault, ...],
    peers: int = PEERS,
    rules: dict[str, Any] | None = None,
    **settings: Any,
) -> list[PeerSpec]:
    swarm = {"target_batch_size": TARGET, "batch_size": 16, **(rules or {})}
    return digits_peers(
        run_id,
        peers,
        swarm=swarm,
        configuration=settings,
        evaluate_every=100 * TARGET,
        seconds=60,
        samples=ROUNDS * TARGET,
        faults=faults,
    )


def identity(line: PeerLine) -> str:
    return str(line.of("dht_ready")[0]["peer_id"])


def assert_books_balance(line: PeerLine) -> None:
    """Computed samples are the sum of samples in rounds and reported losses."""
    entered = lost = 0
    for event in sorted(line.of("round"), key=lambda event: int(event["round"])):
        entered, lost = entered + event["samples"], lost + event["lost"]
        assert event["computed"] == entered + lost


def assert_replicas_agree(lines: list[PeerLine], tolerance: float = 1e-5) -> None:
    told = [{e["round"]: e for e in line.of("weights")} for line in lines]
    for a, b in combinations(told, 2):
        assert a.keys() & b.keys()
        for round_ in a.keys() & b.keys():
            assert a[round_]["finite"] and b[round_]["finite"]
            distance = a[round_].distance(b[round_])
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
        assert {e["tensors"] for e in line.of("rejected")} == {"gradients"}
        log = line.log.read_text()
        for reason in ("not_finite", "norm"):
            assert re.search(f"gradients of {identity(offender)} are refused: {reason}", log)
        large = line.of("rejected")[1]
        assert large["norm"] > large["bound"] > 0
        assert {e["outcome"] for e in line.of("round")} == {"averaged"}, line.story()
        assert_books_balance(line)
        losses = [e["values"]["loss"] for e in line.of("evaluation")]
        assert losses[-1] < 2.3, "it has learned"
    for event in offender.of("round"):
        assert (event["samples"] == 0) == (event["round"] in (NAN_IN, SCALED_IN))
        assert event["excluded"] == (event["samples"] == 0)
    assert_replicas_agree(lines, 1e-2 if settings is POWERSGD else 1e-5)


def test_of_two_peers_the_one_that_is_corrupt_is_refused(socket_path: str, tmp_path: Path) -> None:
    faults = (
        fault(0, "scaled_gradient", 1, rounds=2),
        fault(1, "nan_gradient", 5),
        fault(2, "nan_gradient", 5, peer=0),
    )
    lines = start_swarm(socket_path, specs("pair", faults, peers=2), tmp_path)
    finish_swarm(lines)
    second = lines[1]
    for line in lines:
        seen = {(e["round"], e["offender"], e["reason"]) for e in line.of("rejected")}
        assert {(1, identity(second), "norm"), (2, identity(second), "norm")} <= seen
        outcomes = {e["round"]: e["outcome"] for e in line.of("round")}
        assert outcomes.pop(5) == "skipped", "nobody had a gradient that is a number"
        assert set(outcomes.values()) == {"averaged"}, line.story()
        assert_books_balance(line)
    assert_replicas_agree(lines)


def test_a_peer_that_keeps_climbing_is_found_out_by_option(
    socket_path: str, tmp_path: Path
) -> None:
    rules = {"outlier_filter": "direction"}
    faults = (fault(0, "sign_flip", 1, rounds=10_000),)
    endless = {"budget": Budget(seconds_per_replicate=600, samples_per_replicate=None)}
    swarm = [spec.model_copy(update=endless) for spec in specs("climbing", faults, rules=rules)]
    lines = start_swarm(socket_path, swarm, tmp_path)
    listen(lines, lambda: all(line.of("rejected") for line in lines))
    stop(lines)
    for line in lines:
        seen = {(e["offender"], e["reason"]) for e in line.of("rejected")}
        assert seen == {(identity(lines[1]), "direction")}
        assert min(e["round"] for e in line.of("rejected")) > LEANING
    assert_replicas_agree(lines)


def test_a_clock_that_is_wrong_costs_a_round_at_most(socket_path: str, tmp_path: Path) -> None:
    faults = (
        fault(0, "clock_skew", 3, peer=1, seconds=300.0),
        fault(1, "clock_skew", 5, peer=2, seconds=-300.0),
    )
    lines = start_swarm(socket_path, specs("skewed", faults), tmp_path)
    finish_swarm(lines)
    for line, seconds in ((lines[1], 300.0), (lines[2], -300.0)):
        (told,) = line.of("sabotaged")
        assert told["what"]["off_after_s"] == pytest.approx(seconds, abs=0.1)
    for line in lines:
        outcomes = {e["round"]: e["outcome"] for e in line.of("round")}
        assert {outcomes[r] for r in outcomes if r not in (3, 5)} == {"averaged"}, line.story()


@pytest.mark.parametrize(
    "corrupt",
    [pytest.param((0,), marks=pytest.mark.slow, id="one"), pytest.param((0, 1), id="all")],
)
def test_a_joiner_takes_no_corrupt_state_and_says_whose_it_was(
    socket_path: str, tmp_path: Path, corrupt: tuple[int, ...]
) -> None:
    faults = tuple(
        fault(peer, "corrupt_state", 1, peer=peer, what=what)
        for peer, what in zip(corrupt, ("nan", "scaled"), strict=False)
    )
    run_id = f"donors{len(corrupt)}"
    budget = {"budget": Budget(seconds_per_replicate=600, samples_per_replicate=None)}
    endless = [spec.model_copy(update=budget) for spec in specs(run_id, faults, peers=2)]
    lines = start_swarm(socket_path, endless, tmp_path)
    listen(lines, lambda: all(len(line.of("round")) > 5 for line in lines))
    update = {"peer": 2, "peers": 1, "faults": ()}
    joiner = PeerLine(socket_path, endless[0].model_copy(update=update), tmp_path / "joiner.log")
    joiner.command("start", initial_peers=lines[0].of("dht_ready")[0]["addresses"])
    listen([*lines, joiner], lambda: bool(joiner.of("peer_ready")))
    joiner.command("train")
    lines.append(joiner)
    listen(lines, lambda: len(rounds(joiner, outcome="averaged", group_size=3)) > 3)

    assert not rounds(joiner, outcome="alone"), "it knew of the swarm when it began"
    served = [line for line in lines if any(e["what"].get("served") for e in line.of("sabotaged"))]
    refused = {(e["offender"], e["reason"]) for e in joiner.of("rejected")}
    assert refused <= {(identity(lines[0]), "not_finite"), (identity(lines[1]), "checksum")}
    loaded = joiner.of("state_loaded")[0]
    dense = joiner.of("peer_ready")[0]["dense_payload_bytes"]
    assert loaded["received_bytes"] > max(1, len(refused)) * dense, "also what it refused"
    if len(corrupt) == 2:
        assert len(refused) == 2 and loaded["round_of_state"] == 0, "nobody could be trusted"
    else:
        assert loaded["round_of_state"] > 0, "the other one had a sound state"
    assert len(served) >= len(refused)
    stop(lines)
    told = [{e["round"]: e for e in line.of("weights")} for line in lines]
    last = max(told[0].keys() & told[1].keys() & told[2].keys())
    for each in told[1:]:
        assert told[0][last].distance(each[last]) < 1e-5, (last, [line.story() for line in lines])
