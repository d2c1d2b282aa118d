"""Fault plans on swarms of simulated peers: events, verification and outcome."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhive.cluster.cluster import Cluster
from rayhive.cluster.replicate.peer_table import Outcome
from rayhive.events import Event
from rayhive.spec.fault_plan import FaultPlan
from rayhive.spec.replicate import ReplicateSpec
from tests.integration.cluster_harness import FAKE_FORKSERVER, events_of, groups, litter, replicate

pytestmark = [pytest.mark.cluster]

PATIENT = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.connect("local", forkserver_command=FAKE_FORKSERVER) as cluster:
        yield cluster


def fault(kind: str, *who: str, round: int = 5, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "who": who, "at": {"round": round}, **fields}


def run(
    cluster: Cluster,
    folder: Path,
    *faults: dict[str, Any],
    seconds: float = 6.0,
    at_most: int | None = None,
    **settings: Any,
) -> tuple[Outcome, list[Event]]:
    """Run a replicate of three peers under a plan; return its outcome and events."""
    settings = {"rounds": None, "swarm": {"peers": 3}, **settings}
    settings["budget"] = {"seconds_per_replicate": seconds, "samples_per_replicate": None}
    spec = replicate(folder, **settings)
    numbered = [{"id": f"f{number}", **item} for number, item in enumerate(faults)]
    plan = FaultPlan.model_validate(
        {"scenario": "test", "peers": 3, "faults": numbered, "at_most": at_most}
    )
    spec = ReplicateSpec.model_validate({**spec.model_dump(by_alias=True), "plan": plan})
    handle = cluster.start(spec)
    outcome = handle.wait(PATIENT)
    handle.release()
    assert outcome is not None, handle.status()
    assert groups(spec) == [] and litter(spec) == []
    assert (folder / "plan.json").read_text() == plan.canonical()
    return outcome, events_of(spec)


def of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def test_a_killed_peer_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    outcome, events = run(cluster, tmp_path, fault("kill", "peer-1", heal_after_s=0.5))
    assert outcome == Outcome("completed", "seconds")
    (fired,), (verified,), (healed,) = (
        of(events, f"fault_{what}") for what in ("fired", "verified", "healed")
    )
    assert (fired["fault"], fired["fault_kind"]) == ("f0", "kill")
    assert (fired["who"], fired["lives"]) == (["peer-1"], ["peer-1"])
    assert fired["planned"] == "round 5" and fired["slip_rounds"] >= 0
    assert verified["ok"] is True
    assert healed["lives"] == ["peer-1.1"] and healed["seconds"] >= 0.5
    (lost,) = of(events, "peer_lost")
    assert (lost["peer"], lost["exit_code"]) == ("peer-1", -9)
    spawned = {e["peer"]: (e["slot"], e["life"], e["cause"]) for e in of(events, "peer_spawned")}
    assert spawned.pop("peer-1.1") == ("peer-1", 1, "f0")
    assert spawned == {f"peer-{n}": (f"peer-{n}", 0, None) for n in range(3)}
    finished = {event["peer"] for event in of(events, "peer_finished")}
    assert finished == {"peer-0", "peer-2", "peer-1.1"}


def test_a_late_peer_joins_without_a_failure(cluster: Cluster, tmp_path: Path) -> None:
    outcome, events = run(cluster, tmp_path, fault("join", "peer-3"))
    assert outcome.state == "completed", outcome
    (spawned,) = [event for event in of(events, "peer_spawned") if event["cause"] == "f0"]
    assert (spawned["peer"], spawned["slot"], spawned["life"]) == ("peer-3", "peer-3", 0)
    assert len(of(events, "peer_finished")) == 4


def test_a_replicate_fails_if_all_die_while_a_peer_joins(cluster: Cluster, tmp_path: Path) -> None:
    """The peer that joins knows no other one then, and would begin the run anew."""
    everyone = [f"peer-{number}" for number in range(3)]
    faults = fault("join", "peer-3"), fault("kill", *everyone, round=6)
    outcome, events = run(cluster, tmp_path, *faults, peers={"3": {"startup_s": 30.0}})
    assert outcome.state == "failed", outcome
    newest = max(event["round"] for event in of(events, "round"))
    assert outcome.stop_reason == f"no peer is left that has the state of round {newest}"


def test_a_stopped_peer_goes_on_at_the_latest_when_the_swarm_ends(
    cluster: Cluster, tmp_path: Path
) -> None:
    outcome, events = run(cluster, tmp_path, fault("pause", "peer-2"), seconds=3.0)
    assert outcome == Outcome("completed", "seconds")
    assert of(events, "fault_verified")[0]["ok"] is True
    assert not of(events, "fault_healed") and len(of(events, "peer_finished")) == 3


def test_a_fault_that_fails_makes_the_replicate_invalid(cluster: Cluster, tmp_path: Path) -> None:
    # a pretended peer has no averager to kill
    outcome, events = run(cluster, tmp_path, fault("kill_averager", "peer-1"), seconds=3.0)
    assert outcome.state == "invalid"
    assert "f0 (kill_averager of peer-1 at round 5) failed: inject" in outcome.stop_reason
    (failed,) = of(events, "fault_failed")
    assert failed["phase"] == "inject" and "averager" in failed["error"]


def test_a_fault_that_never_fires_makes_the_replicate_invalid(
    cluster: Cluster, tmp_path: Path
) -> None:
    outcome, _ = run(cluster, tmp_path, fault("kill", "peer-1", round=1_000_000), seconds=1.0)
    assert outcome.state == "invalid" and "did not fire" in outcome.stop_reason


@pytest.mark.parametrize("reason", ["target", "rounds"])
def test_a_replicate_at_its_target_misses_no_later_fault(
    cluster: Cluster, tmp_path: Path, reason: str
) -> None:
    early, late = fault("kill", "peer-1"), fault("kill", "peer-2", round=1_000_000)
    outcome, events = run(cluster, tmp_path, early, late, rounds=60, reason=reason)
    assert [event["fault"] for event in of(events, "fault_fired")] == ["f0"]
    if reason == "target":
        assert outcome == Outcome("completed", "target")
    else:
        assert outcome.state == "invalid" and "f1 (kill of peer-2" in outcome.stop_reason


def test_a_fault_that_fails_is_not_excused_by_the_target(cluster: Cluster, tmp_path: Path) -> None:
    # a pretended peer has no averager to kill
    failing = fault("kill_averager", "peer-1")
    outcome, _ = run(cluster, tmp_path, failing, rounds=60, reason="target")
    assert outcome.state == "invalid" and "failed: inject" in outcome.stop_reason


def test_the_budget_follows_a_fault_that_came_late(cluster: Cluster, tmp_path: Path) -> None:
    stopped = fault("pause", "peer-1", at={"seconds": 1.0}, heal_after_s=2.0)
    killed = fault("kill", "peer-2", at={"seconds": 1.2}, heal_after_s=0.2)
    outcome, events = run(cluster, tmp_path, stopped, killed, seconds=3.0, at_most=1)
    assert outcome == Outcome("completed", "seconds")
    assert [event["ok"] for event in of(events, "fault_verified")] == [True, True]
    slip_s = next(e["slip_s"] for e in of(events, "fault_fired") if e["fault"] == "f1")
    assert slip_s > 1.5, "one may be struck at a time, and the other one is for two seconds"
    (extended,) = of(events, "training_extended")
    assert extended["slip_s"] == slip_s and slip_s - 0.5 < extended["seconds"] <= 3.5


def test_a_death_without_a_fault_is_still_a_failure(cluster: Cluster, tmp_path: Path) -> None:
    outcome, _ = run(
        cluster, tmp_path, fault("kill", "peer-1"), peers={"2": {"die": [30, 3]}}, seconds=20.0
    )
    assert outcome.state == "failed" and outcome.stop_reason.startswith("peer-2")


def test_a_swarm_without_peers_has_failed(cluster: Cluster, tmp_path: Path) -> None:
    everybody = fault("kill", "peer-0", "peer-1", "peer-2")
    outcome, _ = run(cluster, tmp_path, everybody, seconds=20.0)
    assert outcome == Outcome("failed", "no peer is left that trains")
