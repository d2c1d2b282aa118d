"""Values of the objectives of a trial, from the rows of its replicates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rayhive.columns import Row, find_column, is_metric
from rayhive.errors import RayhiveError
from rayhive.metrics.aggregate import without_logarithm
from rayhive.metrics.folds import RestrictedMean
from rayhive.metrics.rows import NO_FAULTS
from rayhive.spec import Budget, SweepConfig
from rayhive.spec.pruning import PRUNED
from rayhive.timeline import FINISHED, UNKNOWN

#: States of a replicate whose measurements count.
GOOD = ("completed", "timed_out")
#: States that the configuration causes: such a replicate is charged in every objective.
CHARGED = ("diverged", "failed")
#: States of a replicate that ran until it was stopped as hopeless: what it measured counts.
CUT = (PRUNED,)
#: Charge for a missed target, in budgets: the penalised average of Hutter, Hoos, Leyton-Brown and
#: Stützle, JAIR 36 (2009). They use a factor of 10, solver competitions usually 2. A finite charge
#: keeps means and hypervolumes finite, and a configuration that sometimes misses its target lies
#: between one that never does and one that always does.
MISS_FACTOR = 2
#: Charge in an unbounded minimised objective while nothing has been measured.
UNKNOWN_WORST = 1e9


class NoValue(RayhiveError):
    """A trial has no value for an objective."""


@dataclass
class Charges:
    """Charges for a replicate without a value, because it diverged or failed or measured none.

    The charge is finite, as Optuna stores no infinite value, and worse than every value measured so
    far:

    * 0 for a maximised objective, as no such column can be negative. A metric of the workload can
      be: below the worst value by the larger of that and the range of all values;
    * :data:`MISS_FACTOR` times the budget for ``time_to_target_s`` and ``samples_to_target``;
    * for any other minimised objective twice the worst value measured so far. Where that is not
      worse, as for a loss that can be negative, the worst value plus the range of all values.

    Attributes:
        config: The study.
    """

    config: SweepConfig
    _range: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)

    def learn(self, rows: Iterable[Row]) -> None:
        """Take account of measured rows."""
        for row in rows:
            for name in self.config.objectives:
                value = _number(row, name) if row["state"] in GOOD else None
                if value is not None:
                    low, high = self._range.get(name, (value, value))
                    self._range[name] = (min(low, value), max(high, value))

    def of(self, name: str) -> float:
        """Return the charge of one replicate in one objective."""
        missed = missed_charge(name, self.config.budget)
        if missed is not None:
            return missed
        maximised = self.config.objectives[name] == "maximize"
        if maximised and not is_metric(name):
            return 0.0
        sign = -1.0 if maximised else 1.0
        if name not in self._range:
            return sign * UNKNOWN_WORST
        low, high = self._range[name]
        worst = low if maximised else high
        return worst + sign * max(abs(worst), high - low, 1e-9)


def objective_values(
    config: SweepConfig, rows: Sequence[Row], charges: Charges | None = None
) -> list[float]:
    """Return the values of the objectives of one trial, in the study's order.

    Each value is the mean, or the worst, of one number per scenario, as ``across_scenarios`` says;
    scenarios have equal weight however many replicates failed. The number of a scenario is the mean
    over its replicates:

    * A replicate that diverged or failed is charged (:class:`Charges`) in every objective,
      whatever it had measured.
    * Any other replicate that was measured is charged in the objectives that it has no value of. It
      missed the target, or had no round to time. A pruned one has no time to the target either.
    * A replicate in any other state, such as an invalid or skipped one, is left out.

    A comparison with a twin lacks a value if the twin does. It is left out, and so is the scenario
    without faults, which is compared with none.

    Args:
        config: The study.
        rows: One row of ``trials.parquet`` for each of the trial's replicates.
        charges: Charges from the rows of the study so far; by default from none.

    Raises:
        NoValue: No replicate under a scenario was measured or charged, or none was compared with
            its twin.
    """
    charges = charges or Charges(config)
    charges.learn(rows)
    scenarios: dict[object, list[Row]] = {}
    for row in rows:
        scenarios.setdefault(row.get("scenario"), []).append(row)
    for name, group in scenarios.items() or {None: []}.items():
        if not any(row["state"] in (*GOOD, *CHARGED, *CUT) for row in group):
            under = f" under {name}" if len(scenarios) > 1 else ""
            raise NoValue(f"no replicate was measured{under}: {_states(group)}")
    values = []
    for name, direction in config.objectives.items():
        means = (
            _scenario_value(group, name, charges)
            for scenario, group in scenarios.items()
            if not _of_twins(name) or scenario != NO_FAULTS or len(scenarios) == 1
        )
        found = [mean for mean in means if mean is not None]
        if not found and any(row["state"] in CHARGED for row in rows):
            found = [charges.of(name)]  # the twin diverged, so no comparison exists
        if not found:
            raise NoValue(f"no replicate has a value of {name}")
        worst = max if direction == "minimize" else min
        values.append(fmean(found) if config.across_scenarios == "mean" else worst(found))
    return values


def count_lacking(config: SweepConfig, rows: Iterable[Row]) -> int:
    """Return the number of replicates that keep their trial off the front.

    With any, the trial is not feasible for the sampler, and not on Optuna's front.
    """
    return sum(lacking(config, row) is not None for row in rows)


def lacking(config: SweepConfig, row: Row) -> str | None:
    """Return why the row of a replicate keeps its configuration off the Pareto front.

    It failed, was invalid or pruned, or has no value of an objective, or a 0 on a log scale. A
    comparison with the twin counts if the row has it. None if nothing keeps the configuration off,
    or the replicate says nothing about it.
    """
    state = str(row["state"])
    if state in UNKNOWN:
        return None
    if state not in FINISHED:
        return {"diverged": "diverged", "failed": "failed"}.get(state, f"was {state}")
    for name in config.objectives:
        if _number(row, name) is None and not _of_twins(name):
            return "missed the target" if _needs_target(name) else f"has no {name}"
    zeros = without_logarithm(row, config.objectives)
    return f"has 0 in {zeros[0]}" if zeros else None


def _needs_target(name: str) -> bool:
    column = find_column(name)
    return column is not None and isinstance(column.fold, RestrictedMean)


def _of_twins(name: str) -> bool:
    """Return whether a column compares a replicate with its twin, which itself lacks it."""
    column = find_column(name)
    return column is not None and column.stage == "twin"


def failure(config: SweepConfig, rows: Sequence[Row]) -> str | None:
    """Return why a trial failed: no replicate was measured, or none has a value of an objective.

    None if it did not fail; a missed target is no failure.
    """
    measured = [row for row in rows if row["state"] in (*GOOD, *CUT)]
    if not measured:
        return f"no replicate completed: {_states(rows)}"
    for name in config.objectives:
        known = any(_number(row, name) is not None for row in measured)
        if not (known or _needs_target(name) or _of_twins(name)):
            return f"no replicate has a value of {name}"
    return None


def _states(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({str(row["state"]) for row in rows})) or "there are none"


def _scenario_value(rows: Sequence[Row], name: str, charges: Charges) -> float | None:
    """Return the mean over the replicates under one scenario, None if none counts."""
    values: list[float] = []
    for row in rows:
        value = _number(row, name) if row["state"] in (*GOOD, *CUT) else None
        if value is not None:
            values.append(value)
        elif row["state"] in CHARGED or (row["state"] in (*GOOD, *CUT) and not _of_twins(name)):
            values.append(charges.of(name))
    return fmean(values) if values else None


def missed_charge(objective: str, budget: Budget) -> float | None:
    """Return the charge for a missed target; None for objectives that do not depend on it."""
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
