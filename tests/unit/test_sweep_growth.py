"""A resumed study may grow; any other change is refused, with what was changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayhive.errors import ConfigError
from rayhive.metrics.rows import replicate_row
from rayhive.report.results import load_results
from rayhive.spec import SweepConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.resolve import ResolvedStudy, WorkloadFacts, resolve
from rayhive.sweep.signals import Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import SHAPES, Recorder, World
from tests.unit.test_sweep_driver import journalled, stored

GIVEN: dict[str, Any] = {
    "name": "study",
    "workload": {"name": "digits"},
    "swarm": {"peers": 2, "target_batch_size": 128},
    "space": {"codec": ["none", "float16", "uniform8"]},
    "replicates": 1,
    "budget": {"trials": 2, "seconds_per_replicate": 30},
}


def make(**fields: Any) -> ResolvedStudy:
    config = SweepConfig.model_validate({**GIVEN, **fields})
    return resolve(config, workload=WorkloadFacts(SHAPES, 32, "real"))


def slower_under_faults(spec: ReplicateSpec) -> Log:
    return Log(spec, seconds=(2.0, 0.5, 0.6, 0.7 + 3.0 * (spec.scenario != "none")))


def run(study: ResolvedStudy, folder: Path) -> tuple[World, Recorder]:
    world, progress = World(log=slower_under_faults), Recorder()
    with Interruption() as interruption:
        target = target_at(connect=world.connect)
        run_sweep(journalled(study, folder), folder, progress, interruption, target)
    return world, progress


def refused(study: ResolvedStudy, folder: Path) -> str:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    world = World()
    with pytest.raises(ConfigError) as caught, Interruption() as interruption:
        target = target_at(connect=world.connect)
        run_sweep(journalled(study, folder), folder, Recorder(), interruption, target)
    assert not world.closed  # the cluster was not even connected to
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return str(caught.value)


@pytest.mark.usefixtures("fakes")
def test_trials_replicates_and_scenarios_may_be_added(run_dir: Path) -> None:
    run(make(), run_dir)
    scenarios = ["kill-one", "none", "spot-g4dn"]
    more = make(
        scenarios=scenarios,
        scenario_args={"spot-g4dn": {"minutes": 40}},
        replicates=2,
        budget={"trials": 3, "seconds_per_replicate": 30},
    )
    world, _ = run(more, run_dir)
    rows = load_results(run_dir).rows
    assert len(rows) == 3 * 3 * 2 and sum(world.starts.values()) == len(rows) - 2
    assert {row["scenario"] for row in rows} == set(scenarios)
    again, _ = run(more, run_dir)
    assert not again.starts


@pytest.mark.usefixtures("fakes")
def test_values_are_taken_over_the_scenarios_that_the_study_began_with(run_dir: Path) -> None:
    run(make(), run_dir)
    before = [trial.values for trial in stored(make(), run_dir) if trial.values is not None]
    run(make(scenarios=["none", "kill-one"], budget={**GIVEN["budget"], "trials": 3}), run_dir)
    trials = [trial for trial in stored(make(), run_dir) if trial.state.name == "COMPLETE"]
    assert [trial.values for trial in trials[:2]] == before
    (calm,) = run_dir.glob(f"trials/{trials[2].number}/r0-none")
    assert trials[2].values[0] == replicate_row(calm)["time_to_target_s"]


def test_a_changed_study_is_refused_with_every_change(run_dir: Path) -> None:
    enqueue = [{"codec": "none"}, {"codec": "float16"}]
    run(make(enqueue=enqueue), run_dir)
    text = refused(
        make(
            enqueue=[enqueue[0], {"codec": "uniform8"}],
            swarm={"peers": 3, "target_batch_size": 128},
            space={"codec": ["none", "uniform8", "quantile8"]},
            seed=4,
        ),
        run_dir,
    )
    assert "swarm.peers: 3 is not valid: 2, as in the run" in text
    assert "seed: 4 is not valid: 0, as in the run" in text
    assert '      - "float16"\n      + "quantile8"' in text
    assert '- {"codec": "float16", "error_feedback": false' in text
    assert '+ {"codec": "uniform8", "error_feedback": false' in text
    assert '{"codec": "none"' not in text.partition("enqueue")[2]


@pytest.mark.usefixtures("fakes")
def test_a_scenario_cannot_be_removed_and_its_arguments_cannot_change(run_dir: Path) -> None:
    faulted = {"scenarios": ["none", "spot-g4dn"], "scenario_args": {"spot-g4dn": {"minutes": 40}}}
    run(make(**faulted), run_dir)
    assert '      - "spot-g4dn"' in refused(make(), run_dir)
    other = {**faulted, "scenario_args": {"spot-g4dn": {"minutes": 50}}}
    assert "scenario_args.spot-g4dn.minutes: 50 is not valid: 40" in refused(make(**other), run_dir)


def test_a_scenario_file_that_plans_other_faults_is_refused_before_anything_starts(
    run_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"

    def study(**act: Any) -> ResolvedStudy:
        acts = [{"kind": "kill", "at": {"round": 5}, "heal_after_s": 1, **act}]
        file.write_text(yaml.safe_dump({"about": "x", "plan": {"acts": acts}}))
        return make(scenarios=["none", str(file)], space={"codec": ["none"]}, budget={"trials": 1})

    run(study(), run_dir)
    text = refused(study(at={"round": 6}), run_dir)
    assert "- f0: kill of peer-" in text and "+ f0: kill of peer-" in text
    assert "at round 5, healed after 1 s" in text and "at round 6, healed after 1 s" in text
    run(study(), run_dir)


def test_a_folder_of_an_earlier_version_began_with_the_scenarios_it_holds(run_dir: Path) -> None:
    """The storage did not yet name them."""
    from rayhive.sweep.run_folder import RunFolder
    from rayhive.sweep.storage import open_study
    from rayhive.sweep.sweep import open_book

    first = replace(make(scenarios=["none"]))
    config = first.config.model_copy(update={"storage": f"journal:{run_dir}.log"})
    folder = RunFolder(run_dir)
    with folder.opened(config) as identity:
        trials = open_study(config, run_dir, identity)
        trials.tell(trials.ask(), [1.0, 2.0])
    grown = make(scenarios=["none", "kill-one"])
    grown = replace(grown, config=grown.config.model_copy(update={"storage": config.storage}))
    folder = RunFolder(run_dir)
    with folder.opened(grown.config) as identity:
        assert open_book(grown, folder, identity).scenarios == {"none"}
    with RunFolder(run_dir).opened(grown.config) as identity:
        assert open_book(grown, RunFolder(run_dir), identity).scenarios == {"none"}


@pytest.mark.usefixtures("fakes")
def test_replicates_of_local_steps_are_added_under_faults_by_round(tmp_path: Path) -> None:
    space = {"codec": ["none"], "local_steps": [None, 4]}  # two sizes of a round
    swarm = {**GIVEN["swarm"], "peers": 3}
    given = {"space": space, "scenarios": ["none", "kill-one"], "swarm": swarm}
    folder = tmp_path / "run"
    assert sum(run(make(**given), folder)[0].starts.values()) == 4
    specs = [ReplicateSpec.model_validate_json(p.read_text()) for p in folder.rglob("spec.json")]
    rounds = {spec.plan.faults[0].at.round for spec in specs if spec.plan and spec.plan.faults}
    assert rounds == {20, 5}
    world, _ = run(make(**given, replicates=2), folder)
    assert sum(world.starts.values()) == 4


@pytest.mark.parametrize(
    ("baseline", "key", "field"),
    [
        ("elastic", "elastic", "checkpoint_every_rounds"),
        ("local-sgd", "local_sgd", "local_steps"),
    ],
)
def test_settings_of_a_baseline_stay_with_its_replicates(
    baseline: str, key: str, field: str, run_dir: Path
) -> None:
    def study(value: int, baselines: tuple[str, ...] = (baseline,)) -> ResolvedStudy:
        return make(baselines=list(baselines), **{key: {field: value}})

    run(study(5, baselines=()), run_dir)
    run(study(11), run_dir)  # not used before
    run(study(11, baselines=()), run_dir)
    assert f"{key}.{field}" in refused(study(17), run_dir)


@pytest.mark.usefixtures("fakes")
def test_faults_by_round_come_after_as_many_samples_with_local_sgd(tmp_path: Path) -> None:
    swarm = {**GIVEN["swarm"], "peers": 3}
    given = {"scenarios": ["kill-one"], "swarm": swarm, "baselines": ["ddp", "local-sgd"]}
    folder = tmp_path / "run"
    run(make(**given, local_sgd={"local_steps": 4}), folder)
    specs = [ReplicateSpec.model_validate_json(p.read_text()) for p in folder.rglob("spec.json")]
    rounds = {
        spec.baseline: spec.plan.faults[0].at.round
        for spec in specs
        if spec.plan and spec.plan.faults and spec.baseline
    }
    assert rounds == {"ddp": 20, "local-sgd": 5}
