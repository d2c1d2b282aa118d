"""From the rows of a trial's replicates to what Optuna is told."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rayhive.errors import RayhiveError
from rayhive.metrics.rows import NO_FAULTS
from rayhive.spec import Budget, SweepConfig

Row = Mapping[str, Any]

#: States of a replicate whose measurements stand.
GOOD = ("completed", "timed_out")
#: States that are the configuration's own doing: such a replicate is charged in every objective.
CHARGED = ("diverged", "failed")
#: A target that was missed is charged this many budgets: the penalised average of Hutter,
#: Hoos, Leyton-Brown and Stützle, JAIR 36 (2009), there with a factor of 10; 2 is the usual one of
#: solver competitions. A finite charge keeps means and hypervolumes finite, and a configuration
#: that misses sometimes lies between one that never does and one that always does.
MISS_FACTOR = 2
#: Columns that only a scenario with faults has.
OF_FAULTS = ("retention", "retention_normalised")
#: The charge for what is minimised and has no bound, as long as nothing was measured.
UNKNOWN_WORST = 1e9


class NoValue(RayhiveError):
    """A trial has no value for an objective."""


class Charges:
    """Charges for a replicate that diverged or failed, one for each objective.

    The charge is finite, as Optuna has no place for an infinite one, and worse than all that was
    measured so far:

    * 0 for what is maximised, as no such column can be negative;
    * :data:`MISS_FACTOR` times the budget for the columns that ask when the target was reached;
    * twice the worst value measured so far for whatever else is minimised, or where that is not
      worse (of a loss that can be negative) the worst value and the range of all values.

    Args:
        config: The study.
    """

    def __init__(self, config: SweepConfig) -> None:
        self._config = config
        self._range: dict[str, tuple[float, float]] = {}

    def learn(self, rows: Iterable[Row]) -> None:
        """Take account of what replicates measured."""
        for row in rows:
            for name in self._config.objectives:
                value = _number(row, name) if row["state"] in GOOD else None
                if value is not None:
                    low, high = self._range.get(name, (value, value))
                    self._range[name] = (min(low, value), max(high, value))

    def of(self, name: str) -> float:
        """Return what one replicate is charged in one objective."""
        missed = missed_charge(name, self._config.budget)
        if missed is not None:
            return missed
        if self._config.objectives[name] == "maximize":
            return 0.0
        if name not in self._range:
            return UNKNOWN_WORST
        best, worst = self._range[name]
        return worst + max(abs(worst), worst - best, 1e-9)


def objective_values(
    config: SweepConfig, rows: Sequence[Row], charges: Charges | None = None
) -> list[float]:
    """Return the values of the objectives of one trial, in the study's order.

    Each is made of one number per scenario, with the same weight however many replicates failed:
    their mean, or the worst of them, as ``across_scenarios`` says. A scenario's number is the mean
    over its replicates, of which one that diverged or failed is charged the worst value
    (:class:`Charges`) in every objective: what it measured before is no merit. One that missed the
    target is charged :data:`MISS_FACTOR` times the budget in the columns that ask when the target
    was reached. A replicate that is neither, such as an invalid one, says nothing. A column that a
    scenario does not have, as retention where nothing breaks, is that of the other scenarios.

    Args:
        config: The study.
        rows: One row of ``trials.parquet`` for each of the trial's replicates.
        charges: What was measured in the study so far; by default nothing.

    Raises:
        NoValue: No replicate under a scenario says anything about the configuration; or none has
            the column.
    """
    charges = charges or Charges(config)
    charges.learn(rows)
    scenarios: dict[object, list[Row]] = {}
    for row in rows:
        scenarios.setdefault(row.get("scenario"), []).append(row)
    for name, group in scenarios.items() or {None: []}.items():
        if not any(row["state"] in (*GOOD, *CHARGED) for row in group):
            states = ", ".join(sorted({str(row["state"]) for row in group})) or "there are none"
            under = f" under {name}" if len(scenarios) > 1 else ""
            raise NoValue(f"no replicate says what it does{under}: {states}")
    values = []
    for name, direction in config.objectives.items():
        groups = [
            group
            for scenario, group in scenarios.items()
            if name not in OF_FAULTS or scenario != NO_FAULTS or len(scenarios) == 1
        ]
        found = [
            mean
            for group in groups
            if (mean := _scenario_value(config, group, name, charges)) is not None
        ]
        if not found and any(row["state"] in CHARGED for row in rows):
            found = [charges.of(name)]  # as the twin diverged, nothing can be compared with it
        if not found:
            raise NoValue(f"no replicate has a value of {name}")
        if config.across_scenarios == "mean":
            values.append(math.fsum(found) / len(found))
        else:
            values.append(max(found) if direction == "minimize" else min(found))
    return values


def failure(rows: Sequence[Row]) -> str | None:
    """Say how the replicates of a trial ended, if none of them came to a good end."""
    if any(row["state"] in GOOD for row in rows):
        return None
    states = ", ".join(sorted({str(row["state"]) for row in rows})) or "there are none"
    return f"no replicate completed: {states}"


def _scenario_value(
    config: SweepConfig, rows: Sequence[Row], name: str, charges: Charges
) -> float | None:
    """Return the mean over the replicates under one scenario, None if none has the column."""
    missed = missed_charge(name, config.budget)
    values: list[float | None] = []
    for row in rows:
        if row["state"] in CHARGED:
            values.append(charges.of(name))
        elif row["state"] in GOOD:
            found = _number(row, name)
            values.append(missed if found is None else found)
    measured = [value for value in values if value is not None]
    return math.fsum(measured) / len(measured) if measured else None


def missed_charge(objective: str, budget: Budget) -> float | None:
    """Return what a replicate that missed the target is charged; None for other objectives."""
    if objective == "time_to_target_s":
        return MISS_FACTOR * budget.seconds_per_replicate
    if objective == "samples_to_target" and budget.samples_per_replicate is not None:
        return float(MISS_FACTOR * budget.samples_per_replicate)
    return None


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    if value is None or isinstance(value, str) or not math.isfinite(value):
        return None
    return float(value)
