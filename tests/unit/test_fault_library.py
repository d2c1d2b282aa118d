"""The library of scenarios: every file of it, with the kinds that there are."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from rayhive.api.scenarios import new_folder, scenario_config
from rayhive.errors import ConfigError
from rayhive.faults.library import PLACES, load_scenario, plan_of
from rayhive.faults.scenario import Scenario
from rayhive.registry import FAULTS, SCENARIOS
from rayhive.spec import SweepConfig
from rayhive.spec.fault_plan import FaultPlan

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "scenarios"
FILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
GRID = tuple(f"preempt-notice-{seconds}" for seconds in (0, 5, 15, 30))
CONCRETE = [name for name in SCENARIOS.names() if name != "preempt-notice"]
ASKED = {
    *("none", "kill-one", "kill-majority", "preempt-notice", "spot-g4dn", "spot-parcae"),
    *("straggler", "flaky-link", "partition-heal", "split-brain", "bootstrap-loss", "nan-peer"),
    *("byzantine-signflip", "late-join", "scale-up", "p2pd-crash", "disk-full", "chaos"),
}


def study_of(name: str, peers: int | None = None) -> SweepConfig:
    return scenario_config(name, peers=peers)


def plan(name: str, seed: int = 0, peers: int | None = None) -> FaultPlan:
    study = study_of(name, peers)
    count = study.swarm.peers
    return plan_of(name, seed=seed, peers=count, swarm=study.swarm, budget=study.budget)


def test_the_library_has_the_documented_scenarios() -> None:
    assert set(FILES) >= ASKED
    assert set(SCENARIOS.names()) == {*FILES, *GRID}
    assert PLACES[1] == FOLDER


@pytest.mark.parametrize("name", CONCRETE)
def test_plans_fit_the_budget_of_their_scenario(name: str) -> None:
    """Every kind is registered, takes these parameters, and comes early enough to recover."""
    scenario = load_scenario(name)
    for seed in range(4):
        for peers in {scenario.file.peers.least, scenario.file.peers.default, 8}:
            found = plan(name, seed, peers)
            assert (found.scenario, found.peers) == (name, peers)
            assert bool(found.faults) == (name != "none")
            assert {fault.kind for fault in found.faults} <= set(scenario.kinds)
            for fault in found.faults:
                heal = fault.heal_after_s or 0.0
                # A round takes well below half a second with the default workload.
                at = fault.at.seconds if fault.at.round is None else fault.at.round / 2
                assert (at or 0.0) + heal <= scenario.seconds - 15, fault
    assert plan(name, 1).canonical() == plan(name, 1).canonical()


def test_every_group_of_kinds_is_in_a_scenario() -> None:
    planned = {FAULTS.get(kind).group for name in CONCRETE for kind in load_scenario(name).kinds}
    assert planned == {kind.group for _, kind in FAULTS.items()}


@pytest.mark.parametrize("name", CONCRETE)
def test_a_scenario_declares_its_summary_kinds_and_needs(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.about().endswith(".") and "$" not in scenario.about()
    assert set(scenario.kinds) <= set(FAULTS.names())
    for kind, needs in scenario.needs.items():
        assert needs == {*FAULTS.get(kind).needs, *(["nodes"] if "elsewhere" in name else [])}
    text = scenario.path.read_text()
    for parameter in scenario.file.args:
        assert f"${parameter}" in text.partition("plan:")[2], "a parameter that does nothing"


def test_settings_of_the_user_replace_those_of_the_scenario(tmp_path: Path) -> None:
    study = study_of("preempt-notice-15")
    assert study.scenarios == ("preempt-notice-15",)
    assert (study.workload.name, study.swarm.peers, study.replicates) == ("digits", 4, 1)
    assert (study.budget.trials, study.budget.seconds_per_replicate) == (1, 75)
    file = tmp_path / "study.yaml"
    given = {
        "name": "other",
        "workload": {"name": "source_lm"},
        "swarm": {"target_batch_size": 512},
        "enqueue": [{"codec": "float16"}, {"codec": "uniform8"}],
        "scenarios": ["none", "chaos"],
        "scenario_args": {"chaos": {"faults": 3}},
        "budget": {"trials": 9, "samples_per_replicate": 10**6},
        "replicates": 5,
        "seed": 3,
        "baselines": ["ddp"],  # extra replicates; some faults are for swarms alone
        "storage": "sqlite:///shared.db",  # keeps a study for the run folder of a sweep
    }
    file.write_text(yaml.safe_dump(given))
    chaos = load_scenario("chaos")
    own = scenario_config("chaos", file, ["scenario_args.chaos.faults=4"], peers=6)
    assert (own.name, own.workload.name, own.scenarios) == ("other", "source_lm", ("chaos",))
    assert (own.swarm.peers, own.swarm.target_batch_size) == (6, 512)
    assert (own.budget.trials, own.budget.seconds_per_replicate) == (1, chaos.seconds)
    assert (own.budget.samples_per_replicate, own.replicates) == (10**6, 1)
    assert [item.codec for item in own.enqueue] == ["float16"]
    assert own.scenario_args == {"chaos": {"faults": 4}}
    assert (own.seed, own.baselines, own.storage) == (3, (), None)
    with pytest.raises(ConfigError, match=r"2 problems") as caught:
        scenario_config("chaos", file, ["swarm.peeers=3", "budget.seconds=2"])
    assert {problem.key for problem in caught.value.problems} == {"swarm.peeers", "budget.seconds"}


def test_a_grid_stands_for_its_members_which_differ_in_the_parameter_alone() -> None:
    assert load_scenario("preempt-notice").members == GRID
    faults = [plan(name, seed=7).faults[0] for name in GRID]
    assert len({fault.who for fault in faults}) == 1
    assert [fault.args["notice_s"] for fault in faults] == [0, 5, 15, 30]
    assert len({plan(name, seed=7).hash for name in GRID}) == 4
    with pytest.raises(ConfigError, match="one member of the grid: preempt-notice-0"):
        plan("preempt-notice")


def test_the_window_of_a_trace_is_a_parameter() -> None:
    study = study_of("spot-g4dn", peers=8)

    def last(minutes: float) -> float:
        found = plan_of(
            "spot-g4dn",
            seed=0,
            peers=8,
            swarm=study.swarm,
            budget=study.budget,
            args={"minutes": minutes},
        )
        return max(fault.at.seconds or 0.0 for fault in found.faults)

    assert last(30) <= 30 < last(100) <= 100


def test_an_unknown_name_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError) as caught:
        load_scenario("kill-on")
    assert caught.value.problems[0].nearest == "kill-one"
    with pytest.raises(ConfigError, match="readable YAML file"):
        load_scenario("./kill-one.yml")


def test_a_scenario_of_the_user_is_found_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    shutil.copy(FOLDER / "kill-one.yaml", path)
    scenario = load_scenario(path)
    assert isinstance(scenario, Scenario) and scenario.name == "mine"
    study = scenario_config(str(path))
    found = plan_of(path, seed=0, peers=4, swarm=study.swarm, budget=study.budget)
    assert found.scenario == "mine" and found.faults[0].kind == "kill"


def test_the_wheel_has_the_library_the_traces_and_the_templates(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"rayhive/faults/scenarios/{name}.yaml" for name in FILES} <= names
    for file in (ROOT / "rayhive" / "faults" / "traces" / "data").rglob("*.*"):
        assert str(file.relative_to(ROOT)) in names
    assert "rayhive/faults/traces/data/bamboo/LICENSE" in names
    for file in (ROOT / "rayhive" / "report" / "page" / "templates").iterdir():
        assert str(file.relative_to(ROOT)) in names
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    script = (
        "import rayhive.faults\n"
        "from rayhive.faults.library import load_scenario, plan_of\n"
        "from rayhive.spec import Budget, SwarmConfig\n"
        "budget = Budget(seconds_per_replicate=140)\n"
        "plan = plan_of('spot-g4dn', seed=0, peers=4, swarm=SwarmConfig(), budget=budget)\n"
        "print(load_scenario('spot-g4dn').path, len(plan.faults))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=True,
    )
    path, _, faults = done.stdout.strip().rpartition(" ")
    assert Path(path).is_relative_to(tmp_path) and int(faults) > 1


def test_a_run_of_a_submitted_job_outlives_the_working_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert new_folder("kill-one").parent == Path("runs")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert new_folder("kill-one").parent == Path.home() / "runs"
