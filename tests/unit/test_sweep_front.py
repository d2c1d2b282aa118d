"""Optuna's front leaves out every trial that the table's front leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest

from rayhive.report.results import load_results
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.objectives import lacking
from rayhive.sweep.storage import open_study
from rayhive.sweep.trial_book import CONSTRAINT
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import Recorder, World
from tests.unit.test_sweep_driver import journalled, make_study, sweep

pytestmark = pytest.mark.usefixtures("fakes")

STUDY: dict[str, Any] = {
    "space": {"codec": ["none", "float16"]},
    "enqueue": [{"codec": "none"}, {"codec": "float16"}],
    "budget": {"trials": 2, "seconds_per_replicate": 30},
    "objectives": {"round_p50_s": "minimize"},
    "replicates": 1,
}


def run(
    folder: Path, log: Callable[[ReplicateSpec], Log], **fields: Any
) -> tuple[optuna.Study, Recorder]:
    """Run a study of two trials, and return its trials as Optuna has them."""
    study = make_study(**{**STUDY, **fields})
    _, progress = sweep(study, folder, World(log=log))
    identity = json.loads((folder / "provenance.json").read_text())["run"]
    return open_study(journalled(study, folder).config, folder, identity), progress


def on_the_table_s_front(folder: Path, scenario: str) -> list[object]:
    rows = load_results(folder).folded
    return [row["codec"] for row in rows if row["pareto"] and row["scenario"] == scenario]


def one_round(spec: ReplicateSpec) -> Log:
    """A replicate without a second round, from which on rounds are timed."""
    return Log(spec, seconds=(0.1,), losses=(1.0,), accuracies=(0.96,))


@pytest.mark.parametrize("across", ["mean", "worst"])
def test_a_scenario_without_a_value_of_an_objective_is_charged(run_dir: Path, across: str) -> None:
    def log(spec: ReplicateSpec) -> Log:
        hard = spec.scenario != "none" and spec.configuration.codec == "float16"
        return one_round(spec) if hard else Log(spec, seconds=(2.0, *(1.0 - spec.trial / 2,) * 3))

    scenarios = {"scenarios": ["none", "kill-one"], "across_scenarios": across}
    found, _ = run(run_dir, log, **scenarios)
    assert on_the_table_s_front(run_dir, "kill-one") == ["none"]
    assert [trial.constraints for trial in found.trials] == [{CONSTRAINT: 0.0}, {CONSTRAINT: 1.0}]
    assert [trial.number for trial in found.best_trials] == [0]
    slow, charge = found.trials[0].values[0], 2 * 1.05  # twice the slowest of both peers
    quick = 0.55
    expected = charge if across == "worst" else (quick + charge) / 2
    assert (slow, found.trials[1].values[0]) == (1.05, pytest.approx(expected))


def test_the_sampler_learns_of_a_trial_without_a_value_of_an_objective(run_dir: Path) -> None:
    found, progress = run(run_dir, lambda spec: one_round(spec) if spec.trial else Log(spec))
    assert on_the_table_s_front(run_dir, "none") == ["none"]
    trial = found.trials[1]
    assert trial.state.name == "COMPLETE" and trial.constraints == {CONSTRAINT: 1.0}
    assert trial.values[0] > found.trials[0].values[0]
    reason = "no replicate has a value of round_p50_s"
    assert progress.of("trial")[1] == (1, tuple(trial.values), reason)
    assert trial.user_attrs["failed"] == reason


def test_a_trial_with_an_invalid_replicate_is_on_neither_front(run_dir: Path) -> None:
    def log(spec: ReplicateSpec) -> Log:
        invalid = spec.trial == 1 and spec.replicate == 1
        seconds = (2.0, 0.5, 0.6, 0.7) if spec.trial == 0 else (2.0, 0.1, 0.1, 0.1)
        return Log(spec, seconds=seconds, state="invalid" if invalid else "completed")

    found, _ = run(run_dir, log, replicates=2)
    assert on_the_table_s_front(run_dir, "none") == ["none"]
    assert [trial.number for trial in found.best_trials] == [0]
    # its value is that of the others
    assert found.trials[1].values[0] < found.trials[0].values[0]


def test_a_trial_that_committed_nothing_in_a_replicate_is_on_neither_front(run_dir: Path) -> None:
    """The table has no mean of ratios with a 0."""

    def log(spec: ReplicateSpec) -> Log:
        idle = spec.trial == 1 and spec.replicate == 1
        losses = (1.0, 0.4 if spec.trial == 1 else 0.5)
        return Log(spec, seconds=() if idle else (2.0, 0.5, 0.6, 0.7), losses=losses)

    objectives = {"samples_per_s": "maximize", "final_loss": "minimize"}
    found, _ = run(run_dir, log, replicates=2, objectives=objectives)
    assert on_the_table_s_front(run_dir, "none") == ["none"]
    assert [trial.number for trial in found.best_trials] == [0]


def test_the_pruner_skips_replicates_beside_one_without_a_value(run_dir: Path) -> None:
    run(run_dir, lambda spec: one_round(spec) if spec.trial else Log(spec), pruner="front")
    more = make_study(**{**STUDY, "pruner": "front", "replicates": 2})
    _, progress = sweep(more, run_dir, World())
    assert sorted(state for _, state, _ in progress.of("finished")) == [
        *["completed"] * 3,
        "skipped",
    ]
    skipped = [row for row in load_results(run_dir).rows if row["state"] == "skipped"]
    assert "replicate 0 has no round_p50_s" in str(skipped[0]["stop_reason"])


def test_the_comparison_with_a_twin_is_not_asked_of_a_single_replicate() -> None:
    config = make_study(
        scenarios=["none", "kill-one"],
        objectives={"retention": "maximize", "final_loss": "minimize"},
    ).config
    row: dict[str, Any] = {"state": "completed", "retention": None, "final_loss": 0.5}
    assert lacking(config, row) is None
    assert lacking(config, {**row, "final_loss": float("nan")}) == "has no final_loss"
    assert lacking(config, {**row, "retention": 0.0}) == "has 0 in retention"
    assert lacking(config, {**row, "state": "lost", "final_loss": None}) is None
