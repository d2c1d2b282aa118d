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

    Each is the mean over replicates, over those that completed or ran out of time. For the
    columns that ask when the target was reached, every replicate counts, and one that missed it
    (or diverged, or failed) is charged :data:`MISS_FACTOR` times the budget.

    Args:
        config: The study.
        rows: One row of ``trials.parquet`` for each of the trial's replicates.

    Raises:
        NoValue: Every replicate failed, or none has the column.
    """
    good = [row for row in rows if row["state"] in GOOD]
    if not good:
        states = ", ".join(sorted({str(row["state"]) for row in rows})) or "there are none"
        raise NoValue(f"no replicate completed: {states}")
    values = []
    for name in config.objectives:
        charge = missed_charge(name, config.budget)
        if charge is None:
            measured = [found for row in good if (found := _number(row, name)) is not None]
        else:
            measured = [
                charge if found is None else found
                for row in rows
                for found in [_number(row, name) if row["state"] in GOOD else None]
            ]
        if not measured:
            raise NoValue(f"no replicate has a value of {name}")
        values.append(math.fsum(measured) / len(measured))
    return values


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
