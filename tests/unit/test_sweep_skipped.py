"""A replicate that was skipped runs once the reason does not hold any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayhive.metrics.pruning import early_stop, verdict
from rayhive.report.results import load_results
from rayhive.spec.pruning import Pruner
from rayhive.spec.replicate import ReplicateSpec
from rayhive.timeline import Timeline
from tests.fixtures.logs import Log, make_spec, records
from tests.unit.sweep_fakes import World
from tests.unit.test_sweep_code import edit, package, study
from tests.unit.test_sweep_code import sweep as sweep_code
from tests.unit.test_sweep_pruning import MISSED, curves, run

__all__ = ["package"]
pytestmark = pytest.mark.usefixtures("fakes")


def test_twins_of_an_added_scenario_are_run(tmp_path: Path) -> None:
    """Replicates without faults are not pruned where others are compared with them."""

    def log(spec: ReplicateSpec) -> Log:
        missed = spec.scenario == "none" and spec.replicate == 0
        return Log(spec, accuracies=MISSED if missed else (0.8, 0.96))

    swarm = {"peers": 3, "target_batch_size": 128}
    run(tmp_path / "run", log, swarm=swarm)
    assert {row["n_skipped"] for row in load_results(tmp_path / "run").folded} == {2}
    run(tmp_path / "run", log, swarm=swarm, scenarios=["none", "kill-one"])
    rows = load_results(tmp_path / "run").rows
    assert {row["state"] for row in rows} == {"completed"}
    assert all(row["loss_delta"] is not None for row in rows if row["scenario"] != "none")


def test_rows_of_other_code_are_not_judged_by_it(package: Path) -> None:
    folder = package.parent / "run"
    sweep_code(
        study(package, pruner="front"), folder, World(log=lambda s: Log(s, accuracies=MISSED))
    )
    edit(package)
    sweep_code(study(package, pruner="front", replicates=3), folder, how="keep-apart")
    rows = load_results(folder).folded
    assert sorted((row["n"], row["n_skipped"], row["reached"]) for row in rows) == [
        (1, 0, 0), (1, 0, 0), (2, 0, 2), (2, 0, 2),
    ]  # fmt: skip


def test_a_replicate_that_has_reached_its_target_goes_on() -> None:
    stop = early_stop(Pruner(name="median", least=3, after=1), curves(0.1, 0.2, 0.3))
    assert stop is not None
    for accuracies, goes_on in ((MISSED, False), ((0.95, 0.5), True), ((0.5, 0.95), True)):
        log = Log(make_spec(), losses=(5.0, 5.0), accuracies=accuracies)
        found = verdict(Timeline(log.spec, records(log.events())), stop, ["peer-0", "peer-1"])
        assert (found is None) == goes_on
