"""Recommendation: the configuration to use under each condition, its certainty and its cost.

The rule: of the configurations that are within :data:`MARGIN` (10 %) of the best one in the first
objective, the best in the second; with more objectives, each but the last narrows the choice in
the same way. A configuration takes part only if every objective is known of all its replicates,
and is not 0 where it is on a log scale.
Baselines of the study take no part.

The certainty is the share of draws from the posterior of the means
(:mod:`rayhive.metrics.posterior`) in which the rule chooses the recommended configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayhive.columns import Row, conditions
from rayhive.metrics.aggregate import is_candidate, ran, rows_by, without_logarithm
from rayhive.metrics.posterior import posterior
from rayhive.metrics.seeds import seed_values
from rayhive.metrics.stats import MAX_LOG
from rayhive.report.results import Results

#: Loss in an objective that is accepted for a gain in the next one.
MARGIN = 0.10
#: Certainty from which a recommendation is called sure, likely, and a recommendation at all.
SURE, LIKELY, LEAD = 0.95, 0.80, 0.50
#: Together the configurations of which one is the best have at least this share of the draws.
SET = 0.95

Array: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Ratio:
    """Value of the recommended configuration / that of another one.

    Attributes:
        value: Ratio of the means; a difference if the objective is not positive throughout.
        low: Lower end of the 95 % interval; None without replicates to compute it from.
        high: Upper end.
        relative: Whether it is a ratio, and no difference.
    """

    value: float
    low: float | None
    high: float | None
    relative: bool

    @property
    def certain(self) -> bool:
        """Whether the interval excludes equality."""
        equal = 1.0 if self.relative else 0.0
        return self.low is not None and self.high is not None and not self.low <= equal <= self.high


@dataclass(frozen=True)
class Candidate:
    """Configuration that the rule could choose.

    Attributes:
        row: Its row of the results table.
        share: Share of the draws in which the rule chooses it; None if certainty is unknown.
        against: Objective -> value of the recommended configuration relative to this one's.
    """

    row: Row
    share: float | None
    against: Mapping[str, Ratio]


@dataclass(frozen=True)
class Recommendation:
    """Recommendation for one set of conditions.

    Attributes:
        conditions: Name -> value of each condition that differs within the run.
        objectives: Column -> ``minimize`` or ``maximize``.
        candidates: Candidates, the recommended one first, then by share. Empty if no configuration
            has all objectives.
        left_out: Rows that are not candidates, each with the reason.
        seeds: Number of common seeds that the certainty is computed from.
        paired: Whether the replicates are compared seed by seed.
    """

    conditions: Mapping[str, Any]
    objectives: Mapping[str, str]
    candidates: tuple[Candidate, ...]
    left_out: tuple[tuple[Row, str], ...]
    seeds: int
    paired: bool

    @property
    def row(self) -> Row | None:
        """Row of the recommended configuration."""
        return self.candidates[0].row if self.candidates else None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Rows that were measured under the conditions, without baselines."""
        return (*(each.row for each in self.candidates), *(row for row, _ in self.left_out))

    @property
    def certainty(self) -> float | None:
        """Share of the draws in which the rule chooses the recommended configuration."""
        return self.candidates[0].share if len(self.candidates) > 1 else None

    @property
    def mark(self) -> str:
        """Mark of the row: ``recommended``, or ``ahead`` if it is not likely the best."""
        sure = self.certainty is not None and self.certainty >= LIKELY
        return "recommended" if sure else "ahead"

    @property
    def possible(self) -> tuple[Candidate, ...]:
        """Smallest set of candidates with :data:`SET` of the draws, the recommended one first."""
        total, found = 0.0, []
        for candidate in self.candidates:
            found.append(candidate)
            total += candidate.share or 0.0
            if total >= SET:
                break
        return tuple(found)


def recommendations(results: Results) -> list[Recommendation]:
    """Return a recommendation for each set of conditions; empty without objectives."""
    if not results.objectives:
        return []
    names = conditions()
    rows = [row for row in results.folded if row["baseline"] is None]
    differing = [n for n in names if len({row.get(n) for row in rows}) > 1]
    return [
        recommend(group, results.objectives, {name: group[0].get(name) for name in differing})
        for group in rows_by(rows, names)
    ]


def recommend(
    rows: Sequence[Row], objectives: Mapping[str, str], of_conditions: Mapping[str, Any]
) -> Recommendation:
    """Return the recommendation among rows that were measured under the same conditions.

    Args:
        rows: Rows of the results table, without baselines.
        objectives: Column to ``minimize`` or ``maximize``.
        of_conditions: Those of the conditions that differ within the run.
    """
    known = [row for row in rows if row["n"] and is_candidate(row, objectives)]
    candidates_of = {id(row) for row in known}
    lacking = (row for row in rows if id(row) not in candidates_of)
    left_out = tuple((row, _lacking(row, objectives)) for row in lacking)
    if not known:
        return Recommendation(of_conditions, objectives, (), left_out, 0, False)
    means = _means(known, objectives)
    draws = means.centre[None] if means.draws is None else means.draws
    shares = np.mean([choose(draw, means.logs) for draw in draws], axis=0)
    first = int(np.argmax(shares))
    order = sorted(range(len(known)), key=lambda n: (n != first, -shares[n], n))
    candidates = tuple(
        Candidate(
            known[n],
            None if means.draws is None else float(shares[n]),
            _against(means, first, n, objectives),
        )
        for n in order
    )
    return Recommendation(
        of_conditions, objectives, candidates, left_out, means.seeds, means.paired
    )


def _lacking(row: Row, objectives: Mapping[str, str]) -> str:
    if not row["n"]:
        return "no replicate finished"
    if row["n_failed"]:
        return f"{row['n_failed']} of {ran(row)} replicates failed"
    if row["n_pruned"]:
        return f"{row['n_pruned']} of {ran(row)} replicates were stopped early"
    reached = row["reached"]
    missed = [name for name in objectives if row.get(name) is None or name.endswith("_to_target_s")]
    if reached is not None and reached != ran(row) and missed:
        return f"{reached} of {ran(row)} replicates reached the target"
    empty = [name for name in objectives if row.get(name) is None]
    zero = without_logarithm(row, objectives)
    if zero and not empty:
        return f"{', '.join(zero)} of a replicate is 0"
    return f"{', '.join(empty or objectives)} not recorded of every replicate"


@dataclass(frozen=True)
class _Means:
    """Means of the objectives of some rows, and draws of what the true ones may be.

    Attributes:
        logs: Whether each objective is a logarithm.
        signs: 1 for each objective that is minimised, -1 for the others.
        centre: Row x objective, smaller is better.
        draws: Draw x row x objective; None if the spread is not known.
        seeds: Number of common seeds, or the fewest replicates of a row.
        paired: Whether the replicates are compared seed by seed.
    """

    logs: tuple[bool, ...]
    signs: Array
    centre: Array
    draws: Array | None
    seeds: int
    paired: bool


def _means(rows: Sequence[Row], objectives: Mapping[str, str]) -> _Means:
    """Return the means of rows in the objectives."""
    found = [seed_values(rows, name).by_factors for name in objectives]
    signs = np.array([1.0 if way == "minimize" else -1.0 for way in objectives.values()])
    known = posterior(rows, objectives)
    there = np.isfinite(found[0].values)
    common = int(there.all(axis=0).sum())
    paired = common > 1 and len(rows) > 1
    seeds = common if paired else int(there.sum(axis=1).min())
    logs = tuple(each.log for each in found)
    return _Means(logs, signs, known.centre, known.draws, seeds, paired)


def choose(costs: Array, logs: Sequence[bool]) -> Array:
    """Return 1 for the candidate that the rule chooses and 0 for the others; equal ones share it.

    Args:
        costs: Candidate x objective, smaller is better, logarithms where ``logs``.
        logs: Whether each objective is a logarithm.
    """
    left = np.arange(len(costs))
    for objective in range(costs.shape[1] - 1):
        column = costs[left, objective]
        margin = math.log1p(MARGIN) if logs[objective] else MARGIN * abs(column.min())
        left = left[column <= column.min() + margin]
    best = left[costs[left, -1] == costs[left, -1].min()]
    shares = np.zeros(len(costs))
    shares[best] = 1.0 / len(best)
    return shares


def _against(means: _Means, first: int, other: int, objectives: Iterable[str]) -> dict[str, Ratio]:
    """Return the recommended row's objectives relative to those of another one."""
    ratios = {}
    for n, name in enumerate(objectives):
        log, sign = means.logs[n], means.signs[n]
        values = sign * means.centre[:, n]
        relative = bool(log or values.min() > 0)
        value = _relative(values[first], values[other], log, relative)
        low = high = None
        if means.draws is not None and first != other:
            drawn = sign * means.draws[:, :, n]
            all_drawn = _relative(drawn[:, first], drawn[:, other], log, relative)
            low, high = (float(end) for end in np.quantile(all_drawn, (0.025, 0.975)))
        ratios[name] = Ratio(float(value), low, high, relative)
    return ratios


def _relative(mine: Any, other: Any, log: bool, relative: bool) -> Any:
    if log:
        return np.exp(np.minimum(mine - other, MAX_LOG))
    return mine / other if relative else mine - other
