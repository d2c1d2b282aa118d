"""Coverage of a killed study: what the verdict of ``benchmarks/killed_study.py`` notices."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.killed_study import has_outcome, planned_kills
from benchmarks.study_coverage import Cell, Coverage, coverage, differences, other_outcomes
from rayhive.spec.replicate import ReplicateSpec
from tests.fixtures.logs import Log, make_spec
from tests.unit.sweep_crashes import Place
from tests.unit.sweep_fakes import World
from tests.unit.test_sweep_driver import make_study

A, B = Cell("none", "none", 1), Cell("float16", "kill-one", 2)
WHOLE = Coverage(
    states={A: ("completed",), B: ("failed",)},
    outcomes={A: 1, B: 1},
    attempts=2,
    counted={("none", "none"): 1, ("float16", "kill-one"): 1},
    told={"none": 1, "float16": 1},
)


def driven(folder: Path, world: World | None = None) -> Path:
    """Return a run folder that a driver has filled."""
    Place(folder, f"sqlite:///{folder}/study.db").drive(make_study(), world)
    return folder


def test_a_run_covers_each_replicate_of_its_study_once(tmp_path: Path) -> None:
    whole = coverage(driven(tmp_path / "whole"))
    assert len(whole.states) == whole.attempts == 6 and set(whole.states.values()) == {
        ("completed",)
    }
    assert sorted(whole.counted.values()) == [2, 2, 2] and list(whole.told.values()) == [1, 1, 1]
    assert list(differences(whole, whole)) == list(other_outcomes(whole, whole)) == []


def test_attempts_that_were_lost_are_no_difference(tmp_path: Path) -> None:
    whole = coverage(driven(tmp_path / "whole"))

    def lost_once(spec: ReplicateSpec) -> Log:
        return Log(spec, state="completed" if spec.attempt else "lost")

    killed = coverage(driven(tmp_path / "killed", World(log=lost_once)))
    assert killed.attempts == 12 and list(differences(killed, whole)) == []


def test_a_replicate_that_was_measured_under_two_trials_is_a_difference(tmp_path: Path) -> None:
    folder = driven(tmp_path / "run")
    whole = coverage(folder)
    shutil.copytree(folder / "trials/0/r1-none", folder / "trials/9/r1-none")
    (text,) = differences(coverage(folder), whole)
    assert text.startswith("killed: not in the table: trials/")


@pytest.mark.parametrize(
    ("changed", "texts"),
    [
        ({"states": {A: ("completed",)}}, ["only in the uninterrupted run: float16, kill-one"]),
        (
            {"states": {**WHOLE.states, Cell("none", "none", 3): ("completed",)},
             "outcomes": {**WHOLE.outcomes, Cell("none", "none", 3): 1}},
            ["only in the killed run: none, none, seed 3"],
        ),
        (
            {"states": {**WHOLE.states, A: ("completed", "completed")}},
            ["killed: 2 rows of none", "killed: 1 outcomes of none"],
        ),
        ({"states": {**WHOLE.states, A: ("lost",)}}, ["killed: lost: none, none, seed 1"]),
        ({"states": {**WHOLE.states, A: ("unfinished",)}}, ["killed: unfinished: none"]),
        ({"outcomes": {A: 2, B: 1}}, ["killed: 2 outcomes of none, none, seed 1"]),
        (
            {"counted": {**WHOLE.counted, ("none", "none"): 2}},
            ["the table counts other numbers: none, none: 2 replicates, uninterrupted 1"],
        ),
        (
            {"told": {"none": 2, "float16": 1}},
            ["killed: Optuna was told 2 times of none", "Optuna was told of other trials: 3"],
        ),
        ({"told": {"none": 1}}, ["Optuna was told of other trials: 1 trials, uninterrupted 2"]),
        ({"damaged": ("a log",)}, ["killed: damaged: a log"]),
    ],
)  # fmt: skip
def test_every_way_to_miss_or_repeat_a_replicate_is_a_difference(
    changed: Mapping[str, Any], texts: list[str]
) -> None:
    found = list(differences(replace(WHOLE, **changed), WHOLE))
    assert [text[: len(start)] for text, start in zip(found, texts, strict=True)] == texts


def test_another_outcome_is_told_and_is_no_difference() -> None:
    killed = replace(WHOLE, states={**WHOLE.states, B: ("completed",)})
    assert list(differences(killed, WHOLE)) == []
    expected = ["float16, kill-one, seed 2: completed, uninterrupted failed"]
    assert list(other_outcomes(killed, WHOLE)) == expected


def test_kills_come_at_random_instants_that_the_seed_determines() -> None:
    kills = planned_kills(10, 3)
    assert kills == planned_kills(10, 3) and kills != planned_kills(10, 4)
    targets = [kill.target for kill in kills]
    assert [targets.count(name) for name in ("driver", "supervisor", "agent")] == [5, 3, 2]
    shares = [kill.share for kill in kills]
    assert shares == sorted(shares) and len(set(shares)) == 10


@pytest.mark.parametrize(
    ("state", "counts"), [("completed", True), ("failed", True), ("lost", False), (None, False)]
)
def test_only_an_end_that_counts_is_an_outcome(
    tmp_path: Path, state: str | None, counts: bool
) -> None:
    folder = Log(make_spec(), state=state).write(tmp_path)
    assert has_outcome(folder / "events.jsonl") is counts
    assert not has_outcome(tmp_path / "none.jsonl")
