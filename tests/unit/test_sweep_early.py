"""Failures of every replicate: reported with file and line, and ended early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import optuna
import pytest

from rayhive.cluster.replicate.peer_table import Outcome
from rayhive.errors import ConfigError, RayhiveError, described
from rayhive.events import Event, ReplicateFinished, make_event
from rayhive.report.results import load_results
from rayhive.spec import Configuration
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.driver import run_order
from rayhive.sweep.early_failures import EarlyFailures
from rayhive.sweep.resolve import resolve
from rayhive.sweep.signals import Interrupted
from rayhive.sweep.trial_book import TrialRecord
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import World
from tests.unit.test_sweep_driver import make_study, stored, sweep

REASON = "peer-{}: ValueError('no corpus') (mine.py, line 12, in training_step)"


@dataclass
class Failing(Log):
    """A replicate that fails for a reason."""

    reason: str = REASON.format(0)

    def tail(self) -> list[Event]:
        return [make_event("replicate_finished", state="failed", stop_reason=self.reason)]


@pytest.fixture
def reasons(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ReplicateSpec], str]], World]:
    """Return a factory of worlds whose replicates fail for a given reason, "" for none."""
    from tests.unit import sweep_fakes

    def finish(self: Any, state: str, reason: str) -> None:
        text = found(self.spec) if state == "completed" else ""
        outcome = Outcome("failed" if text else state, text or reason)
        self.write([ReplicateFinished(state=outcome.state, stop_reason=outcome.stop_reason)])
        self.file.close()
        self.outcome = outcome

    found: Callable[[ReplicateSpec], str] = lambda spec: ""  # noqa: E731

    def world(reason: Callable[[ReplicateSpec], str]) -> World:
        nonlocal found
        found = reason
        return World()

    monkeypatch.setattr(sweep_fakes.Supervisor, "finish", finish)
    return world


def test_equal_first_failures_end_the_sweep(run_dir: Path, reasons: Any) -> None:
    study = make_study()
    world = reasons(lambda spec: REASON.format(spec.trial % 2))
    with pytest.raises(RayhiveError, match=r"the first 3 replicates .* failed alike") as caught:
        sweep(study, run_dir, world)
    assert "mine.py, line 12, in training_step" in str(caught.value)
    assert "logs" in str(caught.value)
    assert sum(world.starts.values()) == 3  # of 6
    states = {trial.state for trial in stored(study, run_dir)}
    assert states <= {optuna.trial.TrialState.RUNNING, optuna.trial.TrialState.FAIL}

    # it is mended: everything is run, and nothing is told of the failures
    done, progress = sweep(study, run_dir, reasons(lambda spec: ""))
    assert (done.trials, done.failed) == (3, 0)
    assert len(progress.of("finished")) == 6
    assert {row["state"] for row in load_results(run_dir).rows} == {"completed"}


def test_trials_are_not_reported_before_equal_failures_are_decided(
    run_dir: Path, reasons: Any
) -> None:
    study = make_study(replicates=1)
    with pytest.raises(RayhiveError, match="failed alike"):
        sweep(study, run_dir, reasons(lambda spec: REASON.format(0)))
    done, _ = sweep(study, run_dir, reasons(lambda spec: ""))
    assert (done.trials, done.failed) == (3, 0)


def test_different_or_late_failures_do_not_end_the_sweep(run_dir: Path, reasons: Any) -> None:
    study = make_study()
    done, _ = sweep(study, run_dir, reasons(lambda spec: f"reason {'abc'[spec.trial % 3]}"))
    assert done.trials == done.failed == 3


def test_one_completed_replicate_rules_out_equal_failures(run_dir: Path, reasons: Any) -> None:
    world = reasons(lambda spec: REASON.format(0) if len(world.ends) else "")
    done, progress = sweep(make_study(), run_dir, world)
    assert done.trials == 3 and len(progress.of("finished")) == 6


def test_failures_of_one_configuration_do_not_end_the_sweep(run_dir: Path, reasons: Any) -> None:
    study = make_study(space={}, budget={"trials": 1}, replicates=4)
    done, _ = sweep(study, run_dir, reasons(lambda spec: REASON.format(0)))
    assert done.failed == 1


def all_but_trial_0_fail(spec: ReplicateSpec) -> str:
    return REASON.format(0) if spec.trial else ""


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("reported", [True, False])
@pytest.mark.parametrize(
    "grown",
    [{"scenarios": ["none", "kill-one"]}, {"budget": {"trials": 6, "seconds_per_replicate": 30}}],
    ids=["with a scenario", "with trials"],
)
def test_a_grown_study_with_results_is_not_ended_by_equal_failures(
    run_dir: Path, reasons: Any, grown: dict[str, Any], reported: bool
) -> None:
    space = {"codec": ["none", "float16", "uniform8"], "delay": ["none", "state"]}
    study, world = make_study(seed=10, space=space), reasons(all_but_trial_0_fail)
    world.tick = lambda: interrupt(not reported and len(world.ends) == 3)
    with nullcontext() if reported else pytest.raises(Interrupted):
        sweep(study, run_dir, world)
    more = make_study(seed=10, space=space, **grown)
    trials = [TrialRecord(n, Configuration(), False) for n in range(more.config.budget.trials)]
    first = islice(run_order(more.config, more.scenarios, 0, trials), 3)
    assert 0 not in {record.number for record, *_ in first}  # the others failed
    done, _ = sweep(more, run_dir, reasons(all_but_trial_0_fail))
    assert (done.trials, done.failed) == (len(trials), len(trials) - 1)
    assert len(load_results(run_dir).rows) == len(trials) * more.replicates_per_trial


def interrupt(now: bool) -> None:
    if now:
        raise Interrupted("enough")


def test_a_grown_study_of_which_everything_failed_is_still_ended(
    run_dir: Path, reasons: Any
) -> None:
    one = make_study(budget={"trials": 1, "seconds_per_replicate": 30}, replicates=4)
    assert sweep(one, run_dir, reasons(lambda spec: REASON.format(0)))[0].failed == 1
    with pytest.raises(RayhiveError, match="failed alike"):
        sweep(make_study(replicates=4), run_dir, reasons(lambda spec: REASON.format(0)))
    done, _ = sweep(make_study(replicates=4), run_dir, reasons(lambda spec: ""))
    assert (done.trials, done.failed) == (3, 1)


def test_failures_are_compared_without_peers_numbers_and_addresses(tmp_path: Path) -> None:
    early = EarlyFailures(tmp_path)
    texts = [
        "peer-0: OSError('<x at 0x7f01>', 17); its log ends with: a",
        "peer-2.1: OSError('<x at 0x9a>', 3)\nmore",
    ]
    for number, text in enumerate(texts):
        early.take(number, {"state": "failed", "stop_reason": text}, tmp_path)
        assert early.undecided
    with pytest.raises(RayhiveError):
        early.take(0, {"state": "failed", "stop_reason": texts[0]}, tmp_path)


def test_an_error_names_the_innermost_line_of_user_code(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    text = "import json\ndef inner():\n    json.loads('{')\ndef outer():\n    inner()\n"
    file.write_text(text)
    names: dict[str, Any] = {}
    exec(compile(text, str(file), "exec"), names)
    with pytest.raises(ValueError, match="Expecting") as caught:
        names["outer"]()
    assert described(caught.value).endswith(f"({file}, line 3, in inner)")
    assert described(ValueError("x")) == "ValueError('x')"
    file.write_text("x = (\n")
    with pytest.raises(SyntaxError) as broken:
        compile(file.read_text(), str(file), "exec")
    assert f"({file}, line 1)" in described(broken.value)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("raise OSError('no corpus')", 2),
        ("import nothing_of_the_kind", 2),
        ("class Mine(Digits):\n    def __init__(self):\n        1 / 0", 4),
        ("class Mine(Digits):\n    def train_size(self):\n        return len(None)", 4),
        ("class Mine(Digits):\n    def module(self, seed):\n        raise KeyError(3)", 4),
        ("class Mine(Digits):\n    def data_files(self):\n        return [self.no]", 4),
    ],
)
def test_a_workload_that_fails_while_it_is_checked_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, line: int
) -> None:
    name = f"failing_{abs(hash((str(tmp_path), body))):x}"
    (tmp_path / f"{name}.py").write_text(f"from rayhive.workloads.digits import Digits\n{body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve({"name": "a", "workload": {"import": f"{name}:Mine"}})
    assert f"({name}.py, line {line}" in str(caught.value)
