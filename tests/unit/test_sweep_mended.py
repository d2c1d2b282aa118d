"""A sweep that ended at common failures goes on once their cause is removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayhive.errors import RayhiveError
from rayhive.report.results import load_results
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.resolve import ResolvedStudy
from tests.fixtures.logs import Log
from tests.unit import test_sweep_parallel as side_by_side
from tests.unit.sweep_fakes import World
from tests.unit.test_sweep_driver import make_study, stored, sweep
from tests.unit.test_sweep_early import REASON, reasons
from tests.unit.test_sweep_lost import again

__all__ = ["reasons"]
BIG = {
    "space": {"codec": ["none", "float16", "uniform8"], "delay": ["none", "state"]},
    "budget": {"trials": 6, "seconds_per_replicate": 30},
}


def fail_unless(mended: Callable[[ReplicateSpec], bool]) -> Callable[[ReplicateSpec], str]:
    return lambda spec: "" if mended(spec) else REASON.format(0)


def states(run: Path) -> dict[tuple[str, int], str]:
    return {
        (str(row["baseline"] or row["trial"]), int(row["replicate"] or 0)): str(row["state"])
        for row in load_results(run).rows
    }


def ended_early(study: ResolvedStudy, run: Path, world: World, parallel: int = 1) -> None:
    with pytest.raises(RayhiveError, match="failed alike"):
        side_by_side.sweep(study, run, world, parallel)


@pytest.mark.parametrize("baseline_fails", [False, True])
def test_a_baseline_beside_the_failures_is_kept_or_run_again(
    run_dir: Path, reasons: Any, baseline_fails: bool
) -> None:
    study = make_study(baselines=["single"], seed=1)  # the baseline is one of the first
    failing = fail_unless(lambda spec: bool(spec.baseline) and not baseline_fails)
    ended_early(study, run_dir, reasons(failing))
    assert states(run_dir)["single", 0] == ("failed" if baseline_fails else "completed")
    done, progress = sweep(study, run_dir, reasons(lambda spec: ""))
    assert (done.trials, done.failed) == (3, 0)
    assert set(states(run_dir).values()) == {"completed"} and len(states(run_dir)) == 8
    assert len(progress.of("started")) == 8 - (not baseline_fails)


def test_a_replicate_that_completed_beside_the_failures_is_kept(
    run_dir: Path, reasons: Any
) -> None:
    class Quick(World):
        def look(self, run_id: str) -> Any:
            supervisor = self.live[run_id]
            supervisor.left *= supervisor.spec.trial != 5  # the others are polled four times
            return super().look(run_id)

    study = make_study(seed=4, **BIG)
    reasons(fail_unless(lambda spec: spec.trial == 5))
    ended_early(study, run_dir, Quick(looks=4), parallel=4)
    assert states(run_dir)["5", 0] == "completed"
    reasons(lambda spec: "")
    done, progress = side_by_side.sweep(study, run_dir, World(), 4)
    assert (done.trials, done.failed) == (6, 0)
    assert set(states(run_dir).values()) == {"completed"}
    assert "5/0/none" not in [name for name, *_ in progress.of("started")]


def test_without_the_mend_it_ends_again_and_goes_on_later(run_dir: Path, reasons: Any) -> None:
    study = make_study(baselines=["single"], seed=1)
    failing = fail_unless(lambda spec: bool(spec.baseline))
    for _ in range(3):
        ended_early(study, run_dir, reasons(failing))
    done, _ = sweep(study, run_dir, reasons(lambda spec: ""))
    assert done.failed == 0 and set(states(run_dir).values()) == {"completed"}


def test_the_pruner_does_not_hide_that_everything_fails(run_dir: Path, reasons: Any) -> None:
    study = make_study(
        pruner="front",
        replicates=3,
        space={"codec": ["none", "float16"]},
        budget={"trials": 2, "seconds_per_replicate": 30},
    )
    ended_early(study, run_dir, reasons(fail_unless(lambda spec: False)))
    done, progress = sweep(study, run_dir, reasons(lambda spec: ""))
    assert (done.failed, len(progress.of("started"))) == (0, 6)


def test_a_mended_replicate_that_is_then_lost_counts_as_lost(run_dir: Path, reasons: Any) -> None:
    study = make_study(replicates=1)
    ended_early(study, run_dir, reasons(fail_unless(lambda spec: False)))
    reasons(lambda spec: "")
    lost = World(log=lambda spec: Log(spec, state="completed" if spec.trial else "lost"))
    sweep(study, run_dir, lost)
    (row,) = [row for row in load_results(run_dir).folded if row["n_lost"]]
    assert (row["n"], row["n_failed"]) == (0, 0)
    assert stored(study, run_dir)[0].values is None
    done, _ = again(study, run_dir, World())
    assert done.failed == 0 and set(states(run_dir).values()) == {"completed"}
