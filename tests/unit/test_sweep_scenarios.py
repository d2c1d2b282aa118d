"""Scenarios in sweeps: twins, plans of replicates, objectives across scenarios, replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayhive.cli import main
from rayhive.cluster.node import capabilities
from rayhive.errors import ConfigError
from rayhive.faults.library import plan_of
from rayhive.spec import SweepConfig
from rayhive.spec.fault_plan import FaultPlan
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.dry_run import make_plan
from rayhive.sweep.objectives import NoValue, objective_values
from rayhive.sweep.replay import recorded_spec
from rayhive.sweep.resolve import ResolvedStudy, replicate_seed, resolve, with_twin
from rayhive.sweep.signals import Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.unit.sweep_fakes import Recorder, World

pytestmark = pytest.mark.usefixtures("fakes")
STUDY: dict[str, Any] = {
    "name": "faulted",
    "workload": {"name": "digits"},
    "swarm": {"peers": 3, "target_batch_size": 128},
    "scenarios": ["kill-one", "preempt-notice"],
    "replicates": 2,
    "budget": {"trials": 1, "seconds_per_replicate": 60},
}
MEMBERS = tuple(f"preempt-notice-{seconds}" for seconds in (0, 5, 15, 30))


def sweep(folder: Path, world: World, **fields: Any) -> Recorder:
    study, progress = resolve({**STUDY, **fields}), Recorder()
    with Interruption() as interruption:
        run_sweep(study, folder, progress, interruption, target_at(connect=world.connect))
    return progress


def specs(folder: Path) -> dict[tuple[str, int], ReplicateSpec]:
    found = [
        ReplicateSpec.model_validate_json(path.read_text())
        for path in folder.glob("trials/*/*/spec.json")
    ]
    return {(spec.scenario, spec.replicate): spec for spec in found}


def test_a_faulted_scenario_adds_its_twin() -> None:
    assert with_twin(["kill-one"]) == ("none", "kill-one")
    assert with_twin(["kill-one", "none"]) == ("kill-one", "none")
    assert with_twin(["none"]) == ("none",)
    study = resolve(STUDY)
    assert study.config.scenarios == ("none", "kill-one", *MEMBERS)
    assert study.twin_added
    assert not resolve({**STUDY, "scenarios": ["none", "kill-one"]}).twin_added
    again = resolve(yaml.safe_load(study.config.to_yaml()))
    assert again.config == study.config and not again.twin_added
    alone = resolve({**STUDY, "twins": False})
    assert alone.config.scenarios == ("kill-one", *MEMBERS) and not alone.twin_added


def test_twins_may_be_added_when_a_study_resumes(tmp_path: Path, world: World) -> None:
    sweep(tmp_path, world, twins=False)
    assert "none" not in {scenario for scenario, _ in specs(tmp_path)}
    before = world.starts.total()
    sweep(tmp_path, world)
    assert {("none", 0), ("none", 1)} <= specs(tmp_path).keys()
    assert world.starts.total() == before + 2
    with pytest.raises(ConfigError, match="scenarios"):
        sweep(tmp_path, world, twins=False)


def test_parameters_of_a_grid_are_those_of_its_members_or_make_it_one_scenario() -> None:
    """They were ignored, and the stored study could not be read back."""
    one = {**STUDY, "scenarios": ["none", "preempt-notice"]}
    study = resolve({**one, "scenario_args": {"preempt-notice": {"notice_s": 2}}})
    assert study.config.scenarios == ("none", "preempt-notice")
    (fault,) = plans_of(study, "preempt-notice")[0].faults
    assert fault.args["notice_s"] == 2
    again = resolve(yaml.safe_load(study.config.to_yaml()))
    assert again.config == study.config
    with pytest.raises(ConfigError, match=r"preempt-notice-\d+: args.faults"):
        resolve({**one, "scenario_args": {"preempt-notice": {"faults": 2}}})


def plans_of(study: ResolvedStudy, scenario: str) -> list[FaultPlan]:
    (plans,) = [each.plans for each in study.scenarios if each.name == scenario]
    return [plan for plan in plans if plan is not None]


def test_every_replicate_has_the_plan_of_its_seed_and_its_twin_has_the_seed(
    run_dir: Path,
) -> None:
    world = World()
    progress = sweep(run_dir, world, scenarios=["kill-one", "spot-g4dn"], **{
        "scenario_args": {"spot-g4dn": {"minutes": 40}}
    })  # fmt: skip
    assert progress.of("began") == [(1, 6)]
    found = specs(run_dir)
    assert set(found) == {(s, r) for s in ("none", "kill-one", "spot-g4dn") for r in (0, 1)}
    for (scenario, number), spec in found.items():
        assert spec.seed == replicate_seed(0, number)
        assert spec.folder == str(run_dir / "trials" / "0" / f"r{number}-{scenario}")
        if scenario == "none":
            assert spec.plan is None
            continue
        assert spec.plan is not None
        assert (spec.plan.scenario, spec.plan.seed, spec.plan.peers) == (scenario, spec.seed, 3)
        args = {"minutes": 40} if scenario == "spot-g4dn" else None
        assert spec.plan == plan_of(
            scenario, seed=spec.seed, peers=3, swarm=spec.swarm, budget=spec.budget, args=args
        )
    assert found["kill-one", 0].plan != found["kill-one", 1].plan
    again = World()
    sweep(run_dir, again, scenarios=["kill-one", "spot-g4dn"], scenario_args={
        "spot-g4dn": {"minutes": 40}
    })  # fmt: skip
    assert not again.starts


def test_a_scenario_file_runs_under_its_name(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "two-kills.yaml"
    act = {"kind": "kill", "at": {"round": 5}, "heal_after_s": 1}
    path.write_text(yaml.safe_dump({"about": "x", "plan": {"acts": [act, act]}}))
    sweep(run_dir, World(), scenarios=[str(path)], replicates=1)
    found = specs(run_dir)
    assert set(found) == {("none", 0), ("two-kills", 0)}
    plan = found["two-kills", 0].plan
    assert plan is not None and len(plan.faults) == 2


def test_replicates_with_different_plans_do_not_share_a_row(run_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    act = {"kind": "kill", "at": {"round": 5}, "heal_after_s": 1}
    path.write_text(yaml.safe_dump({"about": "x", "plan": {"acts": [act]}}))
    sweep(run_dir, World(), scenarios=[str(path)], replicates=1)
    path.write_text(yaml.safe_dump({"about": "x", "plan": {"acts": [act | {"at": {"round": 6}}]}}))
    with pytest.raises(ConfigError) as caught:
        sweep(run_dir, World(), scenarios=[str(path)], replicates=2)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("scenarios", "mine")
    assert "begin a new run folder" in problem.allowed


@pytest.mark.parametrize(
    ("fields", "key", "text"),
    [
        ({"scenarios": ["kil-one"]}, "scenarios", "'kill-one'"),
        ({"scenario_args": {"chaos": {}}}, "scenario_args.chaos", "kill-one"),
        (
            {"scenario_args": {"kill-one": {"x": 1}}},
            "scenarios.kill-one: args.x",
            "known are round",
        ),
        ({"swarm": {"peers": 1}}, "scenarios.kill-one: peers", "at least 2"),
        (
            {"scenarios": ["spot-parcae"], "budget": {"trials": 1, "seconds_per_replicate": 5}},
            "scenarios.spot-parcae: plan.trace.at",
            "longer budget",
        ),
        ({"scenarios": ["kill-one", "kill-one"]}, "scenarios", "listed once"),
        ({"scenarios": ["x/kill-one.yaml"]}, "scenarios", "a name that no scenario has"),
        ({"scenarios": ["no/such.yaml"]}, "scenarios.such: FILE", "readable YAML file"),
    ],
)
def test_mistakes_in_scenarios_are_reported_with_those_of_the_study(
    fields: dict[str, Any], key: str, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({**STUDY, "scenarios": ["kill-one"], **fields, "storage": 3})
    found = {problem.key: str(problem) for problem in caught.value.problems}
    assert set(found) == ({"storage", key} if "x/" not in str(fields) else set(found))
    assert text in found[key]


def test_a_dry_run_counts_scenarios_and_names_the_added_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = make_plan(resolve(STUDY))
    assert (found.replicates, found.longest_s) == (12, 720)
    assert [scenario.name for scenario in found.scenarios] == ["kill-one", *MEMBERS]
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    assert main(["plan", "study.yaml"]) == 0
    out = capsys.readouterr().out
    assert "× 6 scenarios × 2 replicates = 12 replicates of 3 peers" in out
    assert "the scenario none was added" in out
    hashes = [plan.hash[:8] for plan in found.scenarios[0].plans if plan is not None]
    assert f"kill-one: 2 kill in all replicates (plans {', '.join(hashes)})" in out
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({**STUDY, "scenarios": ["none"]}))
    assert main(["plan", "study.yaml"]) == 0
    out = capsys.readouterr().out
    assert "was added" not in out and "plans" not in out


def test_a_study_that_the_machine_cannot_run_is_planned_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = {"signals": "forbidden here"}
    monkeypatch.setattr(capabilities, "here", lambda: lacking)
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(STUDY))
    assert main(["plan", str(file)]) == 2
    said = capsys.readouterr()
    assert "12 replicates" in said.out and "forbidden here" in said.err


def row(scenario: str, loss: float, state: str = "completed", **fields: Any) -> dict[str, Any]:
    return {"scenario": scenario, "state": state, "final_loss": loss, **fields}


def config(**fields: Any) -> SweepConfig:
    given = {"objectives": {"final_loss": "minimize"}, **fields}
    return SweepConfig.model_validate({**STUDY, **given})


def test_an_objective_weighs_scenarios_equally() -> None:
    rows = [row("none", 1.0), row("none", 3.0), row("a", 4.0), row("a", 9.9, "invalid")]
    assert objective_values(config(), rows) == [3.0]
    assert objective_values(config(across_scenarios="worst"), rows) == [4.0]
    one = [row("none", 1.0), row("none", 3.0), row("none", 9.9, "invalid")]
    for across in ("mean", "worst"):
        assert objective_values(config(across_scenarios=across), one) == [2.0]
    # twice the worst that was measured, where it counted as nothing
    rows[-1] = row("a", 0.1, "failed")
    assert objective_values(config(), rows) == [4.0]
    assert objective_values(config(across_scenarios="worst"), rows) == [6.0]


def test_the_worst_scenario_depends_on_the_direction() -> None:
    study = config(objectives={"samples_per_s": "maximize"}, across_scenarios="worst")
    rows = [row("none", 0, samples_per_s=5.0), row("a", 0, samples_per_s=2.0)]
    assert objective_values(study, rows) == [2.0]


def test_a_scenario_without_measurements_fails_the_trial() -> None:
    rows = [row("none", 1.0), row("a", 1.0, "invalid"), row("a", 1.0, "stopped")]
    with pytest.raises(NoValue, match="no replicate was measured under a: invalid, stopped"):
        objective_values(config(), rows)
    rows[-1] = row("a", 1.0, "diverged")
    assert objective_values(config(), rows) == [1.5]


def test_retention_is_charged_for_faulted_scenarios_only() -> None:
    study = config(objectives={"retention": "maximize"})
    good, twin = row("a", 1, retention=0.8), row("none", 1, "diverged", retention=None)
    assert objective_values(study, [twin, row("none", 1, retention=None), good]) == [0.8]
    assert objective_values(study, [twin, row("a", 1, retention=None)]) == [0.0]
    twin["state"] = "completed"  # the twin of another seed
    with pytest.raises(NoValue, match="no replicate has a value of retention"):
        objective_values(study, [twin, row("a", 1, retention=None)])


def test_columns_of_faults_come_from_the_faulted_scenarios() -> None:
    study = config(objectives={"retention": "maximize"})
    rows = [row("none", 1, retention=None), row("a", 1, retention=0.8), row("b", 1, retention=0.6)]
    assert objective_values(study, rows) == [pytest.approx(0.7)]


def test_a_replay_takes_the_recorded_plan_if_the_library_has_changed(
    run_dir: Path, tmp_path: Path
) -> None:
    sweep(run_dir, World(), scenarios=["kill-one"])
    found = specs(run_dir)
    assert recorded_spec(run_dir, 0) == found["kill-one", 0]
    assert recorded_spec(run_dir, 0, 1, "none", tmp_path) == found["none", 1].model_copy(
        update={"folder": str(tmp_path)}
    )
    path = run_dir / "trials" / "0" / "r1-kill-one" / "spec.json"
    spec = json.loads(path.read_text())
    spec["plan"]["faults"][0]["who"] = ["peer-2"]
    path.write_text(json.dumps(spec))
    plan = recorded_spec(run_dir, 0, 1).plan
    assert plan is not None and plan.faults[0].who == ("peer-2",)
    path.write_text("{")
    for arguments, key, allowed in [
        ((1,), "TRIAL", ": 0"),
        ((0, 7), "--replicate", ": 0, 1"),
        ((0, 0, "kil-one"), "--scenario", "kill-one, none"),
        ((0, 1), "DIR", "a replicate"),
    ]:
        with pytest.raises(ConfigError) as caught:
            recorded_spec(run_dir, *arguments)
        (problem,) = caught.value.problems
        assert problem.key == key and allowed in problem.allowed
