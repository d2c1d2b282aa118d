"""Chaos: as many faults as asked for, and never more at once than a swarm can lose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rayhive.errors import ConfigError
from rayhive.faults.library import plan_of
from rayhive.spec import Budget, SwarmConfig
from rayhive.spec.fault_plan import FaultPlan, PlannedFault
from tests.unit.test_fault_plans import write

pytestmark = pytest.mark.usefixtures("fakes")
SETTLE_S = 3.0
MIX: dict[str, Any] = {
    "kill": {"weight": 3, "heal_after_s": {"between": [1, 4]}},
    "pause": {"heal_after_s": {"between": [1, 9]}, "size": "minority"},
    "preempt": {"heal_after_s": 1, "args": {"notice_s": {"choose": [0, 5]}}},
    "kill_node": {"heal_after_s": 6},
    "straggler": {"heal_after_s": 8},
    "nan_gradient": {},
}


def chaos(folder: Path, seed: int, peers: int, **fields: Any) -> FaultPlan:
    given_ = {"faults": 25, "kinds": MIX, "settle_s": SETTLE_S, "spacing_s": {"between": [0, 5]}}
    allows = fields.pop("allows", lambda kind: True)
    return plan_of(
        write(folder, {"chaos": {**given_, **fields}}),
        seed=seed,
        peers=peers,
        swarm=SwarmConfig(peers=peers),
        budget=Budget(seconds_per_replicate=10**5),
        allows=allows,
    )


def spans(plan: FaultPlan) -> Iterator[tuple[float, float, bool, set[str]]]:
    for fault in plan.faults:
        if fault.at.seconds is not None:
            end = fault.at.seconds + (fault.heal_after_s or 0.0) + SETTLE_S
            yield (
                fault.at.seconds,
                end,
                fault.kind != "straggler",
                {name.partition("-")[2] for name in fault.who},
            )


@given(seed=st.integers(0, 10**6), peers=st.integers(3, 12), overlap=st.booleans())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_at_most_a_minority_is_faulted_at_once(
    tmp_path: Path, seed: int, peers: int, overlap: bool
) -> None:
    plan = chaos(tmp_path, seed, peers, overlap=overlap)
    assert len(plan.faults) == 25
    listed = list(spans(plan))
    twice = 0
    for begin, _, _, who in listed:
        now = [(away, other) for start, end, away, other in listed if start <= begin < end - 1e-6]
        struck = Counter(name for _, other in now for name in other)
        taken = {name for away, other in now if away for name in other}
        assert who and len(struck) <= (peers - 1) // 2
        assert all(struck[name] == 1 for name in (taken if overlap else struck))
        twice += max(struck.values()) > 1
    event(f"overlaps: {twice > 0}")
    inside = [fault for fault in plan.faults if fault.kind == "nan_gradient"]
    rounds = [fault.at.round for fault in inside]
    assert len(set(rounds)) == len(rounds) and all(10 <= (r or 0) <= 100 for r in rounds)
    doers = {name.partition("-")[2] for fault in inside for name in fault.who}
    assert len(doers) <= 1
    assert not any(doers & who for *_, who in listed)


def test_faults_overlap_only_with_the_option(tmp_path: Path) -> None:
    slow = {kind: {"heal_after_s": 60} for kind in ("straggler", "rate")}
    for overlap in (False, True):
        plan = chaos(tmp_path, 0, 3, kinds=slow, faults=20, overlap=overlap)
        pairs = list(pairwise(plan.faults))
        together = {a.kind != b.kind for a, b in pairs if at_s(b) < at_s(a) + 60}
        assert together == ({True} if overlap else set()), "two of a kind are never on one peer"


def at_s(fault: PlannedFault) -> float:
    assert fault.at.seconds is not None
    return fault.at.seconds


@given(seed=st.integers(0, 10**6))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_faults_of_one_gradient_act_in_different_rounds(tmp_path: Path, seed: int) -> None:
    inside = {"sign_flip": {"args": {"rounds": {"between": [1, 4]}}}, "nan_gradient": {}}
    plan = chaos(tmp_path, seed, 3, kinds=inside, faults=12, rounds={"between": [3, 60]})
    acts = [
        first + more
        for fault in plan.faults
        if (first := fault.at.round)
        for more in range(fault.args.get("rounds", 1))
    ]
    assert len(plan.faults) == 12 and len(set(acts)) == len(acts)
    assert min(acts) >= 3 and max(acts) <= 60


def test_kinds_are_drawn_in_proportion_to_their_weights(tmp_path: Path) -> None:
    plan = chaos(tmp_path, 0, 9, faults=700, rounds={"between": [1, 500]})
    counts = {kind: sum(fault.kind == kind for fault in plan.faults) for kind in MIX}
    assert sum(counts.values()) == 700
    assert counts["kill"] == pytest.approx(262, abs=60)
    assert all(counts[kind] == pytest.approx(87, abs=40) for kind in MIX if kind != "kill")


def test_kinds_that_the_target_refuses_are_left_out_with_the_option(tmp_path: Path) -> None:
    def allows(kind: str) -> bool:
        return kind not in ("kill_node", "nan_gradient")

    asked = chaos(tmp_path, 1, 5, allows=allows, available_only=True)
    assert {fault.kind for fault in asked.faults} == {"kill", "pause", "preempt", "straggler"}
    assert chaos(tmp_path, 1, 5, allows=allows).hash == chaos(tmp_path, 1, 5).hash


@pytest.mark.parametrize(
    ("peers", "fields", "key"),
    [
        (2, {}, "plan.chaos.faults"),
        (5, {"kinds": {"kill": {}}}, "plan.chaos.kinds.kill.heal_after_s"),
        (5, {"kinds": {"pause": {}}}, "plan.chaos.kinds.pause.heal_after_s"),
        (5, {"kinds": {"kil": {}}}, "plan.chaos.kinds.kil.kind"),
        (5, {"kinds": {"leave": {}}}, "plan.chaos.kinds.leave.heal_after_s"),
        (5, {"kinds": {"nan_gradient": {}}, "rounds": {"between": [1, 3]}}, "plan.chaos.rounds"),
        (5, {"kinds": {"nan_gradient": {}}, "rounds": 0}, "plan.chaos.rounds"),
        (5, {"kinds": {"kill": {"size": "majority"}}}, "plan.chaos.kinds.kill.size"),
        (5, {"kinds": {"join": {}}}, "plan.chaos.kinds.join"),
    ],
)
def test_a_mix_that_no_peer_would_survive_is_refused(
    tmp_path: Path, peers: int, fields: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        chaos(tmp_path, 0, peers, **fields)
    assert {problem.key for problem in caught.value.problems} == {key}
