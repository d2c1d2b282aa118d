"""What a run covers: the replicates in its table, and how often each of them was measured."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rayhive.errors import DamagedError
from rayhive.metrics.logs import read_timelines
from rayhive.metrics.rows import place_of
from rayhive.report.results import load_results
from rayhive.timeline import LOST, UNCOUNTED

#: Columns of the table that count replicates.
COUNTS = ("n", "n_failed", "n_pruned", "n_skipped", "n_lost")


class Cell(NamedTuple):
    """What one replicate measures.

    Attributes:
        configuration: Name of the configuration, or of the baseline.
        scenario: Name of the scenario.
        seed: Seed of the replicate.
    """

    configuration: str
    scenario: str
    seed: int

    def __str__(self) -> str:
        return f"{self.configuration}, {self.scenario}, seed {self.seed}"


@dataclass(frozen=True)
class Coverage:
    """Replicates of a run.

    Attributes:
        states: Cell -> state of each replicate in the table.
        outcomes: Cell -> attempts with an outcome of their own, neither stopped nor lost.
        attempts: Attempts at all replicates.
        counted: Configuration and scenario -> replicates that its row of the table counts.
        told: Configuration -> finished trials that Optuna has of it.
        unlisted: Folders of replicates that are not in the table.
        damaged: Errors of replicates that could not be read.
    """

    states: Mapping[Cell, tuple[str, ...]]
    outcomes: Mapping[Cell, int]
    attempts: int
    counted: Mapping[tuple[str, str], int]
    told: Mapping[str, int]
    unlisted: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()


def coverage(folder: Path) -> Coverage:
    """Read a run folder whose trials are in its own ``study.db``."""
    results = load_results(folder)
    states: dict[Cell, tuple[str, ...]] = {}
    outcomes: Counter[Cell] = Counter()
    attempts = 0
    for row in results.rows:
        cell = Cell(str(row["configuration"]), str(row["scenario"]), int(str(row["seed"])))
        states[cell] = (*states.get(cell, ()), str(row["state"]))
        with contextlib.suppress(DamagedError):  # in `damaged` already
            for timeline in read_timelines(folder / place_of(row)):
                attempts += 1
                outcomes[cell] += timeline.state not in UNCOUNTED | {LOST}
    counted = {
        (str(row["configuration"]), str(row["scenario"])): sum(
            int(str(row.get(name) or 0)) for name in COUNTS
        )
        for row in results.folded
    }
    folders = {str(path.relative_to(folder)) for path in folder.glob("trials/*/*")}
    unlisted = tuple(sorted(folders - {str(place_of(row)) for row in results.rows}))
    return Coverage(states, outcomes, attempts, counted, _told(folder), unlisted, results.damaged)


def _told(folder: Path) -> dict[str, int]:
    """Return the trials of each configuration that Optuna counts."""
    import optuna

    storage = f"sqlite:///{folder / 'study.db'}"
    (name,) = optuna.get_all_study_names(storage)
    found: Counter[str] = Counter()
    for trial in optuna.load_study(study_name=name, storage=storage).get_trials():
        if trial.user_attrs.keys() & {"orphan", "duplicate_of", "amends"}:
            continue  # of a driver that died, or a repetition: the table has no row of it
        found[str(sorted(trial.user_attrs["configuration"].items()))] += trial.state.is_finished()
    return dict(found)


def differences(killed: Coverage, whole: Coverage) -> Iterator[str]:
    """Yield every way in which a killed run does not cover what an uninterrupted one covers.

    Args:
        killed: The run that was killed and resumed.
        whole: The uninterrupted one.
    """
    for name, run in (("uninterrupted", whole), ("killed", killed)):
        yield from (f"{name}: {text}" for text in _irregular(run))
    yield from (f"only in the uninterrupted run: {cell}" for cell in _without(whole, killed))
    yield from (f"only in the killed run: {cell}" for cell in _without(killed, whole))
    for row in sorted(whole.counted.keys() & killed.counted.keys()):
        if whole.counted[row] != killed.counted[row]:
            found = f"{killed.counted[row]} replicates, uninterrupted {whole.counted[row]}"
            yield f"the table counts other numbers: {', '.join(row)}: {found}"
    if killed.told != whole.told:
        found = f"{sum(killed.told.values())} trials, uninterrupted {sum(whole.told.values())}"
        yield f"Optuna was told of other trials: {found}"


def _without(run: Coverage, other: Coverage) -> list[Cell]:
    """Return the cells of a run that another one lacks."""
    return sorted(run.states.keys() - other.states.keys())


def _irregular(run: Coverage) -> Iterator[str]:
    """Yield the replicates that are not in the table exactly once, with one outcome."""
    yield from (f"damaged: {text}" for text in run.damaged)
    yield from (f"not in the table: {place}" for place in run.unlisted)
    for cell, states in sorted(run.states.items()):
        if len(states) != 1:
            yield f"{len(states)} rows of {cell}"
        if unusable := [state for state in states if state in UNCOUNTED | {LOST}]:
            yield f"{', '.join(unusable)}: {cell}"
        if run.outcomes[cell] != len(states):
            yield f"{run.outcomes[cell]} outcomes of {cell}"
    for configuration, number in sorted(run.told.items()):
        if number != 1:
            yield f"Optuna was told {number} times of {configuration}"


def other_outcomes(killed: Coverage, whole: Coverage) -> Iterator[str]:
    """Yield the replicates that ended in another state, which depends on their measurements too."""
    for cell in sorted(killed.states.keys() & whole.states.keys()):
        if killed.states[cell] != whole.states[cell]:
            ends = (", ".join(run.states[cell]) for run in (killed, whole))
            yield "{}: {}, uninterrupted {}".format(cell, *ends)
