from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from rayhive.errors import ConfigError, Problem
from rayhive.metrics.rows import replicate_row
from rayhive.spec import Configuration, SweepConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.attempts import finished_event
from rayhive.sweep.driver import Done
from rayhive.sweep.objectives import UNKNOWN_WORST, Charges, NoValue, failure, objective_values
from rayhive.sweep.provenance import code_revision
from rayhive.sweep.replicate_runner import ReplicateRunner, prepare
from rayhive.sweep.resolve import ResolvedStudy, WorkloadFacts, replicate_seed, resolve
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.signals import Interruption
from rayhive.sweep.storage import open_study
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from rayhive.sweep.trial_book import CONSTRAINT
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import SHAPES, FakeCluster, Recorder, World

STEPS = [
    Configuration(),
    Configuration(codec="float16", error_feedback=False),
    Configuration(powersgd_rank=1, min_compression_ratio=0.5),
]


def make_study(**fields: Any) -> ResolvedStudy:
    given: dict[str, Any] = {
        "name": "study",
        "workload": {"name": "digits"},
        "swarm": {"peers": 2, "target_batch_size": 128},
        "space": {"codec": ["none", "float16", "uniform8"]},
        "replicates": 2,
        "budget": {"trials": 3, "seconds_per_replicate": 30},
    }
    config = SweepConfig.model_validate({**given, **fields})
    return resolve(config, workload=WorkloadFacts(SHAPES, 32, "real"))


def journalled(study: ResolvedStudy, folder: Path) -> ResolvedStudy:
    """Keep trials in a journal, which is far quicker than SQLite where a disk is slow."""
    return replace(
        study, config=study.config.model_copy(update={"storage": f"journal:{folder}.log"})
    )


def sweep(study: ResolvedStudy, folder: Path, world: World) -> tuple[Done, Recorder]:
    progress = Recorder()
    with Interruption() as interruption:
        study = journalled(study, folder)
        done = run_sweep(study, folder, progress, interruption, target_at(connect=world.connect))
    return done, progress


def stored(study: ResolvedStudy, folder: Path) -> list[optuna.trial.FrozenTrial]:
    run = json.loads((folder / "provenance.json").read_text())["run"]
    return open_study(journalled(study, folder).config, folder, run).get_trials()


def test_a_sweep_runs_every_replicate_of_every_trial_once(run_dir: Path) -> None:
    study, world, progress = make_study(), World(), Recorder()
    with Interruption() as interruption:
        done = run_sweep(study, run_dir, progress, interruption, target_at(connect=world.connect))
    assert done == Done(trials=3, failed=0, duplicates=done.duplicates, exhausted=False)
    assert sorted(world.starts.values()) == [1] * 6
    assert len(progress.of("finished")) == 6
    assert not world.live and world.closed == 1
    folders = sorted(path.parent for path in run_dir.glob("trials/*/*/events.jsonl"))
    assert len(folders) == 6
    specs = [
        ReplicateSpec.model_validate_json((path / "spec.json").read_text()) for path in folders
    ]
    assert {spec.configuration.codec for spec in specs} == {"none", "float16", "uniform8"}
    assert {spec.git_revision for spec in specs} == {code_revision()}
    assert {spec.seed for spec in specs} == {replicate_seed(0, 0), replicate_seed(0, 1)}
    for name in ("sweep.yaml", "study.db", "provenance.json"):
        assert (run_dir / name).exists()


def test_values_are_means_over_replicates(run_dir: Path) -> None:
    def log(spec: ReplicateSpec) -> Log:
        seconds = (2.0, 0.5, 0.6, 0.7 + spec.replicate)
        return Log(spec, seconds=seconds, payload=4000 + 400 * spec.replicate)

    study = make_study(budget={"trials": 1}, space={})
    _, progress = sweep(study, run_dir, World(log=log))
    rows = [replicate_row(path) for path in sorted(run_dir.glob("trials/0/*"))]
    (trial,) = stored(study, run_dir)
    expected = [
        sum(row[name] for row in rows) / 2  # type: ignore[misc]
        for name in ("time_to_target_s", "payload_bytes_per_sample")
    ]
    assert trial.values == pytest.approx(expected)
    assert rows[0]["time_to_target_s"] != rows[1]["time_to_target_s"]
    assert progress.of("trial") == [(0, tuple(trial.values), None)]


def test_optunas_front_has_no_trial_that_missed_the_target(run_dir: Path) -> None:
    """The one that misses it in a replicate sends fewer bytes, and has a better mean time."""

    def log(spec: ReplicateSpec) -> Log:
        bad = spec.configuration.codec == "float16" and spec.replicate == 1
        return Log(spec, accuracies=(0.1, 0.2) if bad else (0.8, 0.96), payload=100)

    enqueue = [{"codec": "none"}, {"codec": "float16"}]
    study = make_study(budget={"trials": 2}, enqueue=enqueue)
    sweep(study, run_dir, World(log=log))
    run = json.loads((run_dir / "provenance.json").read_text())["run"]
    found = open_study(journalled(study, run_dir).config, run_dir, run)
    assert [trial.constraints for trial in found.trials] == [{CONSTRAINT: 0.0}, {CONSTRAINT: 1.0}]
    assert [trial.number for trial in found.best_trials] == [0]


def test_enqueued_configurations_come_first_and_in_order(run_dir: Path) -> None:
    study = make_study(enqueue=STEPS, budget={"trials": 5}, space={"delay": ["none", "state"]})
    sweep(study, run_dir, World())
    tried = [trial.user_attrs["configuration"] for trial in stored(study, run_dir)][:3]
    assert [Configuration.model_validate(item) for item in tried] == STEPS


def test_equivalent_configurations_run_once(run_dir: Path) -> None:
    same = [
        Configuration(codec="size_adaptive", threshold=10**6),
        Configuration(codec="float16"),
        Configuration(codec="size_adaptive", threshold=10**7),
        Configuration(),
    ]
    study = make_study(enqueue=same, budget={"trials": 4}, space={"codec": ["none", "uniform8"]})
    done, _ = sweep(study, run_dir, World())
    assert done.trials == 3 and done.exhausted
    assert done.duplicates >= 2
    trials = stored(study, run_dir)
    repeated = {
        trial.number: trial.user_attrs["duplicate_of"]
        for trial in trials
        if "duplicate_of" in trial.user_attrs
    }
    assert {1: 0, 2: 0}.items() <= repeated.items()
    assert all(trials[number].state.name == "FAIL" for number in repeated)
    assert len(list(run_dir.glob("trials/*"))) == 3


def test_a_space_that_is_exhausted_before_the_budget_is_reported(run_dir: Path) -> None:
    study = make_study(budget={"trials": 10})
    done, progress = sweep(study, run_dir, World())
    assert done.trials == 3 and done.exhausted
    assert progress.of("note") == [
        ("the space has no further configuration: 3 instead of 10 trials",)
    ]
    assert progress.of("began") == [(3, 2)]


def test_every_configuration_of_a_small_space_is_found_despite_repeated_suggestions(
    run_dir: Path,
) -> None:
    delays = ["none", "state", "optimizer", "gradients"]
    codecs = ["none", "float16", "uniform8"]
    study = make_study(
        space={"codec": codecs, "delay": delays}, budget={"trials": 12}, replicates=1
    )
    done, _ = sweep(study, run_dir, World())
    assert done.trials == 12 and not done.exhausted
    assert len(stored(study, run_dir)) == 12 + done.duplicates


@pytest.mark.parametrize("state", ["diverged", "failed", "timed_out"])
def test_the_state_of_a_replicate_is_kept(run_dir: Path, state: str) -> None:
    def log(spec: ReplicateSpec) -> Log:
        return Log(spec, state=state if spec.replicate == 1 else "completed")

    study = make_study(budget={"trials": 1, "seconds_per_replicate": 30}, space={})
    done, progress = sweep(study, run_dir, World(log=log))
    assert done.failed == 0
    assert [item[1] for item in progress.of("finished")] == ["completed", state]
    (trial,) = stored(study, run_dir)
    reached = 4.3  # the clock of the slower peer
    missed = 60.0  # twice the budget
    expected = reached if state == "timed_out" else (reached + missed) / 2
    assert trial.values[0] == pytest.approx(expected, rel=0.1)


def test_a_trial_whose_replicates_all_failed_is_failed_and_not_repeated(run_dir: Path) -> None:
    def log(spec: ReplicateSpec) -> Log:
        return Log(spec, state="failed" if spec.trial == 0 else "completed")

    study, world = make_study(), World(log=log)
    done, progress = sweep(study, run_dir, world)
    assert (done.trials, done.failed) == (3, 1)
    trials = stored(study, run_dir)
    # the sampler passes over what is told as failed, and would suggest more of the kind
    assert trials[0].state.name == "COMPLETE"
    told = {number: (values, reason) for number, values, reason in progress.of("trial")}
    assert told[0] == (tuple(trials[0].values), "no replicate completed: failed")
    others = [values for number, (values, reason) in told.items() if number and reason is None]
    assert len(others) == 2
    assert all(mine > max(theirs) for mine, *theirs in zip(trials[0].values, *others, strict=True))
    assert trials[0].user_attrs["failed"] == "no replicate completed: failed"
    again, progress = sweep(study, run_dir, world)
    assert again == done and sum(world.starts.values()) == 6
    assert all(kept for *_, kept in progress.of("finished"))


def test_a_replicate_without_a_value_of_an_objective_is_charged() -> None:
    config = make_study(objectives={"final_loss": "minimize"}).config
    rows = [{"state": "completed", "final_loss": loss} for loss in (None, float("nan"), 2.0)]
    assert objective_values(config, rows) == [pytest.approx((4.0 + 4.0 + 2.0) / 3)]
    assert objective_values(config, rows[:2]) == [UNKNOWN_WORST]
    assert failure(config, rows) is None


def test_an_objective_without_values_fails_the_trial_and_is_named() -> None:
    config = make_study(objectives={"final_loss": "minimize"}).config
    rows = [{"state": "completed", "final_loss": None}]
    assert failure(config, rows) == "no replicate has a value of final_loss"


def test_a_missed_target_costs_twice_the_budget() -> None:
    names = {"time_to_target_s": "minimize", "samples_to_target": "minimize"}
    budget = {"seconds_per_replicate": 10, "samples_per_replicate": 1000}
    config = make_study(objectives=names, budget=budget).config
    hit = {"state": "completed", "time_to_target_s": 4.0, "samples_to_target": 500}
    miss = {"state": "timed_out", "time_to_target_s": None, "samples_to_target": None}
    assert objective_values(config, [hit, miss]) == [12.0, 1250.0]
    assert objective_values(config, [miss, miss]) == [20.0, 2000.0]
    assert objective_values(config, [hit, {**hit, "state": "diverged"}]) == [12.0, 1250.0]


def test_a_diverged_or_failed_replicate_is_charged_in_every_objective() -> None:
    names = {"final_loss": "minimize", "samples_per_s": "maximize", "time_to_target_s": "minimize"}
    config = make_study(objectives=names, budget={"seconds_per_replicate": 10}).config
    good = {"state": "completed", "final_loss": 0.5, "samples_per_s": 80.0, "time_to_target_s": 4.0}
    bad = {**good, "state": "diverged", "final_loss": 0.1}  # what it measured is no merit
    assert objective_values(config, [good, bad]) == [0.75, 40.0, 12.0]
    assert objective_values(config, [good, {**bad, "state": "failed"}]) == [0.75, 40.0, 12.0]
    charges = Charges(config)
    charges.learn([{**good, "final_loss": 3.0}, {**bad, "final_loss": 1e30}])
    assert objective_values(config, [bad, bad], charges) == [6.0, 0.0, 20.0]
    assert objective_values(config, [bad]) == [UNKNOWN_WORST, 0.0, 20.0]
    with pytest.raises(NoValue, match="invalid"):
        objective_values(config, [{**good, "state": "invalid"}])


@pytest.mark.parametrize("losses", [(-5.0, -3.0), (-2.0, 4.0), (0.0, 0.0), (1.0, 1.0)])
def test_a_charge_is_worse_than_every_measured_value(losses: tuple[float, ...]) -> None:
    charges = Charges(make_study(objectives={"final_loss": "minimize"}).config)
    charges.learn({"state": "completed", "final_loss": loss} for loss in losses)
    assert max(losses) < charges.of("final_loss") < 1e9


def test_more_trials_and_replicates_continue_a_run(run_dir: Path) -> None:
    world = World()
    sweep(make_study(budget={"trials": 2}), run_dir, world)
    before = {path: path.read_bytes() for path in run_dir.glob("trials/*/*/events.jsonl")}
    study = make_study(budget={"trials": 3}, replicates=3)
    done, progress = sweep(study, run_dir, world)
    assert done.trials == 3
    assert len(world.starts) == 9 and set(world.starts.values()) == {1}
    assert {path: path.read_bytes() for path in before} == before
    assert sum(kept for *_, kept in progress.of("finished")) == 4
    assert "replicates: 3" in (run_dir / "sweep.yaml").read_text()


def test_a_replicate_whose_supervisor_dies_runs_again(run_dir: Path) -> None:
    study, world = make_study(budget={"trials": 1}, space={}, replicates=1), World()
    world.lose = {"study-t0-r0-none-a0"}
    done, progress = sweep(study, run_dir, world)
    assert done.failed == 0
    assert progress.of("started") == [("0/0/none", 0, False), ("0/0/none", 1, False)]
    folder = run_dir / "trials/0/r0-none"
    assert (folder / "events.attempt-0.jsonl").exists()
    assert replicate_row(folder)["attempt"] == 1


def test_a_replicate_that_is_lost_in_every_attempt_is_not_charged(run_dir: Path) -> None:
    study, world = make_study(budget={"trials": 1}, space={}, replicates=1), World()
    world.lose = {f"study-t0-r0-none-a{attempt}" for attempt in range(9)}
    done, _ = sweep(study, run_dir, world)
    assert done.failed == 1
    assert world.starts["0/0/none"] == 3
    finished = finished_event(run_dir / "trials/0/r0-none")
    assert finished is not None and finished["state"] == "lost"
    (trial,) = stored(study, run_dir)
    assert trial.state.name == "FAIL" and trial.user_attrs["lost"]


def test_the_driver_waits_for_a_supervisor_that_does_not_answer(run_dir: Path) -> None:
    world, progress = World(), Recorder()
    spec = prepare(
        ReplicateSpec(
            study="study",
            trial=0,
            replicate=0,
            workload={"name": "digits"},
            swarm=make_study().config.swarm,
            configuration={},
            folder=str(run_dir),
        )
    )
    FakeCluster(world).start(spec)
    world.silent = 3
    assert ReplicateRunner(FakeCluster(world), progress, Interruption(), poll_s=0.0).run(spec)
    assert progress.of("started") == [("0/0/none", 0, True)]
    assert world.starts["0/0/none"] == 1 and world.silent == 0
    assert progress.of("note") == [(f"{spec.run_id} does not answer; waiting for it",)]


def test_a_swarm_that_does_not_fit_is_refused_before_anything_is_written(run_dir: Path) -> None:
    world = World()
    world.room = [Problem("swarm.peers", 2, "at most 1: this cluster has 1 core")]
    with pytest.raises(ConfigError, match="at most 1"):
        sweep(make_study(), run_dir, world)
    assert not run_dir.exists() and world.closed == 1


def test_the_space_of_a_study_may_be_all_constants(run_dir: Path) -> None:
    study = make_study(space={}, budget={"trials": 2})
    done, _ = sweep(study, run_dir, World())
    assert done.trials == 1 and done.exhausted
    assert RunFolder(run_dir).has_trials
