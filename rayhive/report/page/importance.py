"""Section "importance of each axis": functional ANOVA, computed by Optuna."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayhive.columns import Row
from rayhive.metrics.aggregate import objectives_known
from rayhive.report.page.run_data import RunData
from rayhive.spec import AXES

#: Seeds of the forests; the spread over them shows how much the estimate depends on the forest.
SEEDS = range(3)
#: Trees of a forest.
TREES = 24
#: Rows below which an importance is called a hint.
HINT = 20
#: Least number of rows.
LEAST = 4
#: Value of an axis that does not apply to a configuration.
ABSENT = "does not apply"


@dataclass(frozen=True)
class AxisImportance:
    """Importance of one axis for one objective.

    Attributes:
        axis: Name of the axis.
        share: Share of the variance that the axis explains [%], the mean over the forests.
        low: Smallest share [%].
        high: Largest share [%].
    """

    axis: str
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Importance:
    """Importance of the axes under one set of conditions.

    Attributes:
        conditions: The conditions in words; empty if the run has only one set.
        rows: Number of configurations that it is computed from.
        objectives: Objective -> axes, the most important first.
        constant: Axes that had one value only.
        together: Groups of axes that change together, so that their shares can't be told apart.
        reason: Why there is nothing to show; empty otherwise.
    """

    conditions: str
    rows: int
    objectives: Mapping[str, tuple[AxisImportance, ...]]
    constant: tuple[str, ...]
    reason: str = ""
    together: tuple[tuple[str, ...], ...] = ()

    @property
    def hint(self) -> bool:
        """Whether there are so few configurations that the order is no more than a hint."""
        return self.rows < HINT


def importances(run: RunData) -> list[Importance]:
    """Return the importance of the axes for each set of conditions; empty without objectives."""
    return [_of_group(run, rows) for rows in run.groups] if run.results.objectives else []


def _of_group(run: RunData, rows: Sequence[Row]) -> Importance:
    where = run.condition_text(rows[0])
    swarms = [row for row in rows if row["n"] and row["baseline"] is None]
    known = [row for row in swarms if objectives_known(row, run.results.objectives)]
    names = [axis.name for axis in AXES]
    differing = [name for name in names if len({row.get(name) for row in known}) > 1]
    constant = tuple(name for name in names if name not in differing)
    if len(known) < LEAST or not differing:
        reason = (
            f"{len(known)} configurations have all objectives; at least {LEAST} are needed"
            if len(known) < LEAST
            else "no axis has two values"
        )
        return Importance(where, len(known), {}, constant, reason)
    found = {name: _importance(known, differing, name) for name in run.results.objectives}
    return Importance(where, len(known), found, constant, together=_together(known, differing))


def _together(rows: Sequence[Row], axes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of axes that divide the rows alike."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for axis in axes:
        values = [_choice(row, axis) for row in rows]
        if len(set(values)) > 1:
            groups.setdefault(tuple(map(values.index, values)), []).append(axis)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _importance(
    rows: Sequence[Row], axes: Sequence[str], objective: str
) -> tuple[AxisImportance, ...]:
    values = [float(row[objective] or 0.0) for row in rows]
    if min(values) == max(values):
        return ()
    shares = [_shares(rows, axes, values, seed) for seed in SEEDS]
    found = []
    for axis in axes:
        each = [100 * share.get(axis, 0.0) for share in shares]
        found.append(AxisImportance(axis, sum(each) / len(each), min(each), max(each)))
    return tuple(sorted(found, key=lambda item: -item.share))


def _shares(
    rows: Sequence[Row], axes: Sequence[str], values: Sequence[float], seed: int
) -> dict[str, float]:
    """Return the share of the variance that each axis explains, 0 to 1.

    The study is made of the rows, so that it does not depend on the storage that the sweep used.
    """
    import optuna

    logging.getLogger("optuna").setLevel(logging.WARNING)
    choices: dict[str, Any] = {}
    for axis in axes:
        seen = sorted({_choice(row, axis) for row in rows})
        choices[axis] = optuna.distributions.CategoricalDistribution(seen)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for row, value in zip(rows, values, strict=True):
        params = {axis: _choice(row, axis) for axis in axes}
        trial = optuna.trial.create_trial(params=params, distributions=choices, value=value)
        study.add_trial(trial)
    evaluator = optuna.importance.FanovaImportanceEvaluator(n_trees=TREES, seed=seed)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator))


def _choice(row: Row, axis: str) -> str:
    """Return the value of an axis as a choice: real numbers by their two leading digits."""
    value = row.get(axis)
    if value is None:
        return ABSENT
    return f"{value:.2g}" if isinstance(value, float) else str(value)
