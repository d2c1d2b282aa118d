"""From the rows of a trial's replicates to what Optuna is told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rayhive.config import Budget, SweepConfig
from rayhive.errors import RayhiveError

Row = Mapping[str, Any]

#: States of a replicate whose measurements stand.
GOOD = ("completed", "timed_out")
#: A target that was missed is charged this many budgets: the penalised average of Hutter,
#: Hoos, Leyton-Brown and Stützle, JAIR 36 (2009), there with a factor of 10; 2 is the usual one of
#: solver competitions. A finite charge keeps means and hypervolumes finite, and a configuration
#: that misses sometimes lies between one that never does and one that always does.
MISS_FACTOR = 2


class NoValue(RayhiveError):
    """A trial has no value for an objective."""


def objective_values(config: SweepConfig, rows: Sequence[Row]) -> list[float]:
    """Return the values of the objectives of one trial, in the study's order.

    Each is made of one number per scenario, with the same weight however many replicates failed:
    their mean, or the worst of them, as ``across_scenarios`` says. A scenario's number is the mean
    over its replicates that completed or ran out of time. For the columns that ask when the target
    was reached, every replicate counts, and one that missed it (or diverged, or failed) is charged
    :data:`MISS_FACTOR` times the budget. A column that a scenario does not have, as retention
    where nothing breaks, is that of the other scenarios.

    Args:
        config: The study.
        rows: One row of ``trials.parquet`` for each of the trial's replicates.

    Raises:
        NoValue: Every replicate under a scenario failed, so that the trial did not show what it
            does there; or none has the column.
    """
    scenarios: dict[object, list[Row]] = {}
    for row in rows:
        scenarios.setdefault(row.get("scenario"), []).append(row)
    for name, group in scenarios.items() or {None: []}.items():
        if not any(row["state"] in GOOD for row in group):
            states = ", ".join(sorted({str(row["state"]) for row in group})) or "there are none"
            under = f" under {name}" if len(scenarios) > 1 else ""
            raise NoValue(f"no replicate completed{under}: {states}")
    values = []
    for name, direction in config.objectives.items():
        charge = missed_charge(name, config.budget)
        found = [
            mean
            for group in scenarios.values()
            if (mean := _scenario_value(group, name, charge)) is not None
        ]
        if not found:
            raise NoValue(f"no replicate has a value of {name}")
        if config.across_scenarios == "mean":
            values.append(math.fsum(found) / len(found))
        else:
            values.append(max(found) if direction == "minimize" else min(found))
    return values


def _scenario_value(rows: Sequence[Row], name: str, charge: float | None) -> float | None:
    """Return the mean over the replicates under one scenario, None if none has the column."""
    if charge is None:
        good = [row for row in rows if row["state"] in GOOD]
        measured = [found for row in good if (found := _number(row, name)) is not None]
    else:
        measured = [
            charge if found is None else found
            for row in rows
            for found in [_number(row, name) if row["state"] in GOOD else None]
        ]
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
