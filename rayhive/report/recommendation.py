"""Recommendation: the configuration to use under each condition, its certainty and its cost.

The rule: of the configurations that are within :data:`MARGIN` (10 %) of the best one in the first
objective, the best in the second; with more objectives, each but the last narrows the choice in
the same way. A configuration takes part only if every objective is known of all its replicates.

The certainty is the share of draws from the posterior of the means in which the rule chooses the
recommended configuration. The means are those of a randomised complete block design (Box, Hunter
and Hunter, *Statistics for Experimenters*, chapter 4): objective = configuration + seed +
residual, with one covariance of the residuals for all configurations. Objectives that are
positive throughout are analysed as logarithms, since times and bytes vary by factors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rayhive.columns import Row, conditions
from rayhive.metrics.aggregate import objectives_known, ran, row_key, rows_by
from rayhive.report.results import Results
from rayhive.timeline import FINISHED

#: Loss in an objective that is accepted for a gain in the next one.
MARGIN = 0.10
#: Number of draws from the posterior.
DRAWS = 4000
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
    def certainty(self) -> float | None:
        """Share of the draws in which the rule chooses the recommended configuration."""
        return self.candidates[0].share if len(self.candidates) > 1 else None

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
    differing = [n for n in names if len({row.get(n) for row in results.folded}) > 1]
    return [
        _recommend(results, group, {name: group[0].get(name) for name in differing})
        for group in rows_by(results.folded, names)
    ]


def _recommend(
    results: Results, rows: Sequence[Row], of_conditions: Mapping[str, Any]
) -> Recommendation:
    objectives = results.objectives
    known = [row for row in rows if row["n"] and objectives_known(row, objectives)]
    left_out = tuple((row, _lacking(row, objectives)) for row in rows if row not in known)
    if not known:
        return Recommendation(of_conditions, objectives, (), left_out, 0, False)
    values = [_by_seed(results, row) for row in known]
    logs = [_is_positive(known, values, name) for name in objectives]
    signs = np.array([1.0 if way == "minimize" else -1.0 for way in objectives.values()])
    centre = np.array(
        [[_at(row[n], log) for n, log in zip(objectives, logs, strict=True)] for row in known]
    )
    spread = _spread(values, list(objectives), logs)
    draws = centre[None] if spread is None else _draws(centre, spread)
    shares = np.mean([_chosen(draw * signs, logs) for draw in draws], axis=0)
    first = int(np.argmax(shares))
    order = sorted(range(len(known)), key=lambda n: (n != first, -shares[n], n))
    candidates = tuple(
        Candidate(
            known[n],
            None if spread is None else float(shares[n]),
            _against(
                draws,
                centre,
                first,
                n,
                dict(zip(objectives, logs, strict=True)),
                spread is not None,
            ),
        )
        for n in order
    )
    seeds, paired = (0, False) if spread is None else (spread.seeds, spread.paired)
    return Recommendation(of_conditions, objectives, candidates, left_out, seeds, paired)


def _lacking(row: Row, objectives: Mapping[str, str]) -> str:
    if not row["n"]:
        return "no replicate finished"
    if row["n_failed"]:
        return f"{row['n_failed']} of {ran(row)} replicates failed"
    reached = row["reached"]
    missed = [name for name in objectives if row[name] is None or name.endswith("_to_target_s")]
    if reached is not None and reached != ran(row) and missed:
        return f"{reached} of {ran(row)} replicates reached the target"
    empty = [name for name in objectives if row[name] is None]
    return f"{', '.join(empty or objectives)} not recorded of every replicate"


def _by_seed(results: Results, row: Row) -> dict[Any, Row]:
    """Return the finished replicates of a row by seed."""
    names = (*results.by, *conditions()) if results.by else row_key()
    return {
        each["seed"]: each
        for each in results.rows
        if each["state"] in FINISHED and all(each.get(name) == row.get(name) for name in names)
    }


def _is_positive(known: Sequence[Row], values: Sequence[Mapping[Any, Row]], name: str) -> bool:
    cells = [row[name] for row in known]
    cells += [row[name] for by_seed in values for row in by_seed.values()]
    return all(isinstance(cell, (int, float)) and cell > 0 for cell in cells)


def _at(value: Any, log: bool) -> float:
    return math.log(value) if log else float(value)


@dataclass(frozen=True)
class _Spread:
    """Covariance of the residuals of one replicate, and its degrees of freedom."""

    covariance: Array
    freedom: int
    sizes: Array
    seeds: int
    paired: bool


def _spread(
    values: Sequence[Mapping[Any, Row]], names: Sequence[str], logs: Sequence[bool]
) -> _Spread | None:
    """Return the spread of the replicates; None if there is no pair to compute it from."""
    common = sorted(set.intersection(*(set(by_seed) for by_seed in values)), key=str)
    sizes = np.array([float(len(by_seed)) for by_seed in values])
    paired = len(common) > 1 and len(values) > 1
    blocks = []
    for by_seed in values:
        rows = [by_seed[seed] for seed in common] if paired else list(by_seed.values())
        cells = [
            [_at(row[name], log) for name, log in zip(names, logs, strict=True)] for row in rows
        ]
        blocks.append(np.array(cells) - np.mean(cells, axis=0))
    if paired:
        table = np.stack(blocks)
        residuals = (table - table.mean(axis=0)).reshape(-1, len(names))
        freedom = (len(values) - 1) * (len(common) - 1)
        sizes = np.full(len(values), float(len(common)))
    else:
        residuals = np.concatenate(blocks)
        freedom = int(sizes.sum()) - len(values)
    if freedom < 1:
        return None
    covariance = residuals.T @ residuals / freedom
    return _Spread(covariance, freedom, sizes, len(common) if paired else int(sizes.min()), paired)


def _draws(centre: Array, spread: _Spread) -> Array:
    """Return draws from the posterior of the means (draw, candidate, objective), the same always.

    Multivariate t: normal with the covariance / n, times the root of freedom / chi-square.
    """
    generator = np.random.default_rng(0)
    shape = (DRAWS, *centre.shape)
    noise = generator.multivariate_normal(
        np.zeros(centre.shape[1]), spread.covariance, size=shape[:2], method="svd"
    )
    scale = np.sqrt(spread.freedom / generator.chisquare(spread.freedom, size=(DRAWS, 1, 1)))
    draws: Array = centre + noise * scale / np.sqrt(spread.sizes)[None, :, None]
    return draws


def _chosen(costs: Array, logs: Sequence[bool]) -> Array:
    """Return 1 for the candidate that the rule chooses and 0 for the others; equal ones share.

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


def _against(
    draws: Array, centre: Array, first: int, other: int, logs: Mapping[str, bool], known: bool
) -> dict[str, Ratio]:
    ratios = {}
    for n, (name, log) in enumerate(logs.items()):
        value = centre[first, n] - centre[other, n]
        ends = np.quantile(draws[:, first, n] - draws[:, other, n], (0.025, 0.975))
        found = [math.exp(min(each, 700.0)) if log else float(each) for each in (value, *ends)]
        low, high = (found[1], found[2]) if known and first != other else (None, None)
        ratios[name] = Ratio(found[0], low, high, log)
    return ratios
