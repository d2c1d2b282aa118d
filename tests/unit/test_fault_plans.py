"""From a scenario file and a seed to a plan: the same for the same seed, or every mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayhive.errors import ConfigError, Problem
from rayhive.faults.drawing import SeededRng
from rayhive.faults.generators.acts import Selector
from rayhive.faults.library import load_scenario, plan_of
from rayhive.spec import Budget, NodeClass, SwarmConfig
from rayhive.spec.fault_plan import FaultPlan

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("fakes")

ACTS: list[dict[str, Any]] = [
    {"kind": "kill", "at": {"round": {"between": [3, 9]}}, "heal_after_s": 2},
    {"kind": "kill", "at": {"round": {"between": [13, 30]}}, "heal_after_s": {"between": [1, 3]}},
    {
        "kind": "pause",
        "who": "minority",
        "at": {"seconds": {"between": [2, 4]}},
        "heal_after_s": 0.5,
    },
    {"kind": "straggler", "at": {"seconds": 5}, "args": {"cores": {"choose": [0.1, 0.3]}}},
    {"kind": "straggler", "who": "leader", "at": {"seconds": 12}, "heal_after_s": 1},
]


def write(folder: Path, plan: dict[str, Any], name: str = "mine", **fields: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"about": "Something.", "plan": plan, **fields}))
    return path


def planned(path: Path | str, seed: int = 0, peers: int = 5, **more: Any) -> FaultPlan:
    budget = more.pop("budget", Budget(seconds_per_replicate=60))
    swarm = more.pop("swarm", SwarmConfig(peers=peers))
    return plan_of(path, seed=seed, peers=peers, swarm=swarm, budget=budget, **more)


def problems(path: Path, **more: Any) -> dict[str, Problem]:
    with pytest.raises(ConfigError) as caught:
        planned(path, **more)
    return {problem.key: problem for problem in caught.value.problems}


def test_a_plan_has_the_faults_of_its_acts(tmp_path: Path) -> None:
    acts = [
        {"kind": "pause", "who": ["peer-1", "peer-3"], "at": {"seconds": 9}, "heal_after_s": 4},
        {"kind": "kill", "who": "bootstrap", "at": {"round": 7}, "args": {"where": "other"}},
        {"kind": "partition", "who": "bootstrap", "at": {"seconds": 2.5}},
        {"kind": "join", "who": ["new", "new"], "at": {"round": 6}},
        {"kind": "join", "who": "new", "at": {"round": 8}},
    ]
    plan = planned(write(tmp_path, {"acts": acts}), seed=3)
    assert (plan.scenario, plan.seed, plan.peers, plan.joins) == ("mine", 3, 5, (5, 6, 7))
    assert [(f.id, f.kind, f.who, str(f.at), f.heal_after_s, f.args) for f in plan.faults] == [
        ("f0", "join", ("peer-5", "peer-6"), "round 6", None, {}),
        ("f1", "kill", ("peer-0",), "round 7", None, {"where": "other"}),
        ("f2", "join", ("peer-7",), "round 8", None, {}),
        ("f3", "partition", ("node-0",), "2.5 s", None, {}),
        ("f4", "pause", ("peer-1", "peer-3"), "9 s", 4.0, {}),
    ]


def test_the_hash_of_a_plan_is_the_recorded_one(tmp_path: Path) -> None:
    """It changes only if plans made by earlier versions are to be made no more."""
    path = write(tmp_path, {"acts": ACTS})
    recorded = {
        0: "fadee9f84155ff79a0902452aee60c59286cde0461b139fd1874c2fe03741374",
        1: "b94fd1e99960f490ceb9690388c8d5032774a353bd1787e0d83472393dfcd2c1",
    }
    assert {seed: planned(path, seed).hash for seed in recorded} == recorded


@given(seed=st.integers(0, 2**40), peers=st.integers(3, 30))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, seed: int, peers: int) -> None:
    path = write(tmp_path, {"acts": ACTS})
    first, second = planned(path, seed, peers), planned(path, seed, peers)
    assert first.canonical() == second.canonical()
    assert FaultPlan.model_validate_json(first.canonical()).hash == first.hash


def test_other_processes_make_the_same_plan(tmp_path: Path) -> None:
    """Their hashes of texts are seeded differently."""
    path = write(tmp_path, {"acts": [act for act in ACTS if act["kind"] != "straggler"]})
    script = (
        "import sys, rayhive.faults\n"
        "from rayhive.spec import Budget, SwarmConfig\n"
        "from rayhive.faults.library import plan_of\n"
        "plan = plan_of(sys.argv[1], seed=5, peers=5, swarm=SwarmConfig(), budget=Budget())\n"
        "print(plan.hash)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script, str(path)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert len(found) == 1 and len(found.pop()) == 64


def test_seeds_differ(tmp_path: Path) -> None:
    path = write(tmp_path, {"acts": ACTS})
    assert len({planned(path, seed).hash for seed in range(20)}) == 20


@given(place=st.integers(0, len(ACTS)), seed=st.integers(0, 10**6), data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_further_act_does_not_change_the_other_choices(
    tmp_path: Path, place: int, seed: int, data: st.DataObject
) -> None:
    more: dict[str, Any] = data.draw(
        st.sampled_from(
            [
                {"kind": "pause", "at": {"seconds": 20}, "heal_after_s": 1},
                {"kind": "kill", "at": {"round": 40}, "heal_after_s": 2},
                {"kind": "join", "who": "new", "at": {"seconds": 1}},
            ]
        )
    )
    before = planned(write(tmp_path, {"acts": ACTS}), seed)
    after = planned(write(tmp_path, {"acts": [*ACTS[:place], more, *ACTS[place:]]}), seed)

    def bare(plan: FaultPlan) -> list[str]:
        return sorted(fault.model_dump_json(exclude={"id"}) for fault in plan.faults)

    left = bare(after)
    for fault in bare(before):
        left.remove(fault)
    assert len(left) == 1


def test_parameters_of_a_kind_do_not_change_the_choices(tmp_path: Path) -> None:
    act = {"kind": "preempt", "at": {"round": {"between": [5, 50]}}, "heal_after_s": 2}
    plan = {"acts": [{**act, "args": {"notice_s": "$notice_s"}}]}
    path = write(tmp_path, plan, args={"notice_s": 15})
    for seed in range(5):
        short, long = (planned(path, seed, args={"notice_s": s}).faults[0] for s in (0, 30))
        assert (short.who, short.at) == (long.who, long.at)
        # The heal counts from the end of the notice.
        assert (short.heal_after_s, long.heal_after_s) == (2.0, 32.0)
        assert (short.args["notice_s"], long.args["notice_s"]) == (0, 30)
        assert planned(path, seed).faults[0].heal_after_s == 17.0


@pytest.mark.parametrize(
    ("words", "peers", "size"),
    [
        (["one"], 1, 1),
        (["minority"], 3, 1),
        (["minority"], 4, 1),
        (["minority"], 5, 2),
        (["half"], 4, 2),
        (["half"], 5, 2),
        (["majority"], 4, 3),
        (["majority"], 5, 3),
        (["all"], 5, 5),
        (["one of preemptible"], 5, 1),
        (["preemptible"], 5, 2),
        (["all but bootstrap"], 5, None),
        (["minority but peer-2"], 5, 2),
        (["bootstrap", "peer-3"], 5, 2),
    ],
)
def test_a_selector_chooses_the_stated_number_of_targets(
    words: list[str], peers: int, size: int | None
) -> None:
    classes = {"a": NodeClass(count=3), "b": NodeClass(count=2, preemptible=True)}
    swarm = SwarmConfig(peers=peers, node_classes=classes if peers == 5 else None)
    for seed in range(30):
        found: list[Problem] = []
        names = Selector(swarm, "who", found).choose(words, SeededRng("s", seed))
        if size is None:  # more than there are without the one that is spared
            assert [problem.key for problem in found] == ["who"] and names == ()
            continue
        assert not found
        assert len(set(names)) == len(names) == size
        assert list(names) == sorted(names, key=lambda name: int(name[5:]))
        assert all(0 <= int(name.removeprefix("peer-")) < peers for name in names)
        if "preemptible" in words[0]:
            assert set(names) <= {"peer-3", "peer-4"}
        if "but peer-2" in words[0]:
            assert "peer-2" not in names


def test_every_peer_can_be_chosen() -> None:
    swarm = SwarmConfig(peers=4)
    seen = {Selector(swarm, "who", []).choose(["one"], SeededRng(seed)) for seed in range(60)}
    assert seen == {("peer-0",), ("peer-1",), ("peer-2",), ("peer-3",)}


@pytest.mark.parametrize(
    ("act", "key", "text"),
    [
        ({"kind": "kil"}, "plan.acts.0.kind", "'kill'"),
        ({"who": "minorty"}, "plan.acts.0.who", "'minority'"),
        ({"who": "peer-7"}, "plan.acts.0.who", "one of the 5 peers"),
        ({"who": "one of preemptible"}, "plan.acts.0.who", "swarm.node_classes"),
        ({"who": ["leader", "peer-1"]}, "plan.acts.0.who", "stands alone"),
        ({"who": "all"}, "plan.acts.0.who", "no peer would be left at round 3"),
        ({"who": "all", "heal_after_s": 2}, "plan.acts.0.who", "no peer would be left"),
        ({"at": {"seconds": 60}}, "plan.acts.0.at", "fires at 60 s of 60 s"),
        ({"at": {"seconds": 50}, "heal_after_s": 20}, "plan.acts.0.at", "ends at 70 s of 60 s"),
        ({"at": {"round": 0}}, "plan.acts.0.at", "a round is a whole number"),
        ({"at": {"round": 1, "seconds": 2}}, "plan.acts.0.at", "exactly one"),
        ({"at": {"seconds": {"between": [9, 2]}}}, "plan.acts.0.at.seconds", "least to the"),
        ({"heal_after_s": 100}, "plan.acts.0.heal_after_s", "less than 60 s"),
        ({"kind": "join", "who": "peer-1"}, "plan.acts.0.who", "a new peer: peer-5"),
        ({"kind": "join", "who": "peer-6"}, "plan", "no gaps"),
        ({"kind": "join", "who": "new", "heal_after_s": 2}, "plan.acts.0.heal_after_s", "absent"),
        ({"args": {"wher": "same"}}, "plan.acts.0.args.wher", "'where'"),
        ({"args": {"where": "elsewhere"}}, "plan.acts.0.args.where", "same|other"),
        ({"kind": "nan_gradient", "at": {"seconds": 4}}, "plan.acts.0.at", "a round"),
        ({"kind": "nan_gradient", "who": "leader"}, "plan.acts.0.who", "spec before training"),
        ({"args": {"where": {"choose": []}}}, "plan.acts.0.args", "either between"),
        ({"args": {"where": {"choose": 3}}}, "plan.acts.0.args", "either between"),
        ({"args": {"where": {"between": ["a", "b"]}}}, "plan.acts.0.args", "either between"),
        ({"args": {"where": {"between": [3, 1]}}}, "plan.acts.0.args", "either between"),
        ({"hwo": "one"}, "plan.acts.0.hwo", "'who'"),
        ({"args": {"where": "$place"}}, "plan.acts.0.args.where", "none"),
    ],
)
def test_each_mistake_is_reported_under_its_key(
    tmp_path: Path, act: dict[str, Any], key: str, text: str
) -> None:
    path = write(tmp_path, {"acts": [{"kind": "kill", "who": "one", "at": {"round": 3}, **act}]})
    found = problems(path)
    assert list(found) == [key]
    assert text in str(found[key])


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    acts = [
        {"kind": "kill", "who": "peer-9", "at": {"seconds": 70}},
        {"kind": "pausee", "who": "som", "at": {"seconds": 1}},
        {"kind": "kill", "args": {"where": 3}, "at": {"round": 2}},
    ]
    assert set(problems(write(tmp_path, {"acts": acts}))) == {
        "plan.acts.0.at",
        "plan.acts.0.who",
        "plan.acts.1.who",
        "plan.acts.2.args.where",
    }
    wrong = write(tmp_path, {"actss": [], "chaos": {"faults": 0}})
    assert {"plan.actss", "plan.chaos.faults", "plan.chaos.kinds"} == set(problems(wrong))


def test_a_plan_with_rounds_fits_a_budget_of_samples(tmp_path: Path) -> None:
    path = write(tmp_path, {"acts": [{"kind": "kill", "at": {"round": 10}}]})
    swarm = SwarmConfig(peers=5, target_batch_size=100)
    planned(path, swarm=swarm, budget=Budget(samples_per_replicate=1001))
    found = problems(path, swarm=swarm, budget=Budget(samples_per_replicate=1000))
    assert "a round before the last, 10" in found["plan.acts.0.at"].allowed


def test_the_last_round_of_a_fault_is_in_the_budget_too(tmp_path: Path) -> None:
    act = {"kind": "sign_flip", "who": "peer-1", "at": {"round": 3}, "args": {"rounds": 8}}
    path = write(tmp_path, {"acts": [act]})
    swarm = SwarmConfig(peers=5, target_batch_size=100)
    planned(path, swarm=swarm, budget=Budget(samples_per_replicate=1100))
    found = problems(path, swarm=swarm, budget=Budget(samples_per_replicate=1000))
    assert set(found) == {"plan.acts.0.at"}


def test_faults_that_together_leave_no_peer_are_refused(tmp_path: Path) -> None:
    def acts(*faults: tuple[str, float, float | None]) -> Path:
        listed = [
            {"kind": "kill", "who": who, "at": {"seconds": at}}
            | ({} if heal is None else {"heal_after_s": heal})
            for who, at, heal in faults
        ]
        return write(tmp_path, {"acts": listed})

    planned(acts(("peer-0", 5, 4), ("peer-1", 9, 4)), peers=2)
    assert "at 8 s" in str(problems(acts(("peer-0", 5, 4), ("peer-1", 8, 4)), peers=2))
    assert "at 30 s" in str(problems(acts(("peer-0", 5, None), ("peer-1", 30, None)), peers=2))
    # A role is a living peer: one more than the peers that are away.
    assert "at 6 s" in str(problems(acts(("peer-0", 5, 4), ("leader", 6, 4)), peers=2))
    planned(acts(("peer-0", 5, 4), ("leader", 6, 4)), peers=3)
    mixed = [
        {"kind": "kill", "who": "peer-0", "at": {"seconds": 5}},
        {"kind": "leave", "who": "peer-1", "at": {"round": 9}},
    ]
    assert "in the end" in str(problems(write(tmp_path, {"acts": mixed}), peers=2))
    joined = [{"kind": "join", "who": "new", "at": {"seconds": 4}}, mixed[0]]
    planned(write(tmp_path, {"acts": [*joined, {**mixed[1], "at": {"seconds": 9}}]}), peers=2)


def test_in_training_faults_of_a_replaced_peer_are_refused(tmp_path: Path) -> None:
    nan = {"kind": "nan_gradient", "who": "peer-1", "at": {"round": 9}}
    kill = {"kind": "kill", "who": "peer-1", "heal_after_s": 1}
    for at in ({"round": 5}, {"seconds": 30}):
        found = problems(write(tmp_path, {"acts": [nan, {**kill, "at": at}]}))
        assert "not in the spec of a replacement" in found["plan.acts.0.who"].allowed
    planned(write(tmp_path, {"acts": [nan, {**kill, "at": {"round": 10}}]}))


def test_two_faults_of_one_gradient_are_refused(tmp_path: Path) -> None:
    flip = {"kind": "sign_flip", "who": "peer-1", "at": {"round": 5}, "args": {"rounds": 4}}

    def acts(**other: Any) -> Path:
        return write(tmp_path, {"acts": [flip, {**flip, "at": {"round": 8}, **other}]})

    found = problems(acts())["plan.acts.1.who"]
    assert found.value == "peer-1" and "sign_flip (round 5) does not change" in found.allowed
    planned(acts(at={"round": 9}))
    planned(acts(who="peer-2"))


def test_faults_on_an_absent_peer_are_refused(tmp_path: Path) -> None:
    kill = {"kind": "kill", "who": "peer-1", "at": {"seconds": 5}, "heal_after_s": 4}
    pause = {"kind": "pause", "who": ["peer-1", "peer-2"], "heal_after_s": 1}
    for seconds in (5, 6, 8.9):
        found = problems(write(tmp_path, {"acts": [kill, {**pause, "at": {"seconds": seconds}}]}))
        assert "kill removed it at 5 s" in found["plan.acts.1.who"].allowed
    planned(write(tmp_path, {"acts": [kill, {**pause, "at": {"seconds": 9}}]}))
    planned(write(tmp_path, {"acts": [kill, {**pause, "at": {"seconds": 4}}]}))
    leave = {"kind": "leave", "who": "peer-1", "at": {"round": 5}}
    found = problems(write(tmp_path, {"acts": [leave, {**pause, "at": {"round": 6}}]}))
    assert "leave removed it at round 5" in found["plan.acts.1.who"].allowed
    slow = {"kind": "straggler", "who": "peer-1", "at": {"seconds": 5}, "heal_after_s": 9}
    planned(write(tmp_path, {"acts": [slow, {**pause, "at": {"seconds": 6}}]}))


def test_mistakes_in_a_scenario_file_are_reported(tmp_path: Path) -> None:
    bad = write(tmp_path, {}, peers={"least": 5}, abuot="x", grid={"n": []}, study={"storge": 1})
    with pytest.raises(ConfigError) as caught:
        planned(bad)
    assert caught.value.source == str(bad)
    assert {problem.key for problem in caught.value.problems} == {"abuot"}
    bad = write(tmp_path, {}, peers={"least": 5}, grid={"n": [1, 1]}, study={"storge": 1})
    assert set(problems(bad)) == {"peers.default", "grid.n", "study.storge"}
    missing = tmp_path / "no" / "such.yaml"
    assert "readable YAML file" in str(problems(missing)["FILE"])


def test_arguments_and_peers_are_checked_against_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {}, peers={"least": 3}, args={"size": 1})
    found = problems(path, peers=2, args={"siez": 2})
    assert found["args.siez"].nearest == "size"
    assert found["peers"].allowed == "at least 3"


def test_a_grid_is_planned_with_one_of_its_values(tmp_path: Path) -> None:
    acts = [{"kind": "preempt", "at": {"round": 5}, "args": {"notice_s": "$notice_s"}}]
    path = write(tmp_path, {"acts": acts}, args={"notice_s": 0}, grid={"notice_s": [0, 5]})
    assert "mine-0, mine-5" in problems(path)["NAME"].allowed
    assert planned(path, args={"notice_s": 5}).faults[0].args["notice_s"] == 5


def test_the_parameters_of_a_trace_s_kind_are_those_that_it_may_plan(tmp_path: Path) -> None:
    given = {"file": "spot-g4dn", "remove": "preempt", "args": {"where": "other"}}
    scenario = load_scenario(write(tmp_path, {"trace": given}))
    assert list(scenario.may_plan()) == [("preempt", {"where": "other"})]
