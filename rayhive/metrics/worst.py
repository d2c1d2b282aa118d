"""Simultaneous intervals of the worst of several means, and of the largest regret."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rayhive.columns import Row
from rayhive.metrics.seeds import SeedValues, differences, seed_values
from rayhive.metrics.stats import CONFIDENCE, Estimate, estimate, log_estimate

Bounds = tuple[float | None, float | None]
_UNKNOWN: Bounds = (None, None)


def worst_bounds(group: Sequence[Row], name: str, sign: float) -> Bounds:
    """Return the interval of the worst mean of a column over some rows.

    If every mean lies in its interval, the worst one lies between the worst lower and the worst
    upper bound. Each of the m intervals has a confidence of 1 - 0.05 / m (Bonferroni).

    Args:
        group: Rows, one for each scenario.
        name: The column.
        sign: 1 if larger values are worse, -1 if smaller ones are.

    Returns:
        The bounds; None if one of the intervals is not known.
    """
    intervals = _intervals(group, name, 1 - (1 - CONFIDENCE) / max(len(group), 1))
    if not intervals or None in intervals:
        return _UNKNOWN
    worst = max if sign > 0 else min
    known = [item for item in intervals if item is not None]
    return worst(low for low, _ in known), worst(high for _, high in known)


def _intervals(
    group: Sequence[Row], name: str, confidence: float
) -> list[tuple[float, float] | None]:
    return [_interval(seed_values([row], name), index=0, confidence=confidence) for row in group]


def _interval(found: SeedValues, index: int, confidence: float) -> tuple[float, float] | None:
    """Return the interval of a row's mean on the column's own scale."""
    line = [value for value in found.values[index].tolist() if math.isfinite(value)]
    if found.column.log:
        line = [math.exp(value) for value in line]
    summary: Estimate | None = (log_estimate if found.column.log else estimate)(line, confidence)
    if summary is None or summary.low is None or summary.high is None:
        return None
    if summary.low == summary.high and not found.exact[index]:
        return None  # equal by chance
    return summary.low, summary.high


def regret_bounds(groups: Sequence[Sequence[Row]], name: str, sign: float) -> list[Bounds]:
    """Return the interval of each configuration's largest distance to a scenario's best one.

    The regret of c under a scenario is the largest of 0 and the differences f(c) - f(d) to the
    other configurations d. These have intervals at equal seeds. On a log scale a difference is
    f(c)·(1 - f(d)/f(c)), within the intervals of f(c) and of the ratio. All intervals hold together
    with a confidence of 0.95 (Bonferroni over scenarios and configurations).

    Args:
        groups: Rows of each configuration, one for each scenario.
        name: The column.
        sign: 1 if it is minimised, -1 if it is maximised.
    """
    if len(groups) < 2:
        return [_UNKNOWN] * len(groups)
    scenarios = [str(row["scenario"]) for row in groups[0]]
    confidence = 1 - (1 - CONFIDENCE) / max(len(scenarios) * len(groups), 1)
    found: list[Bounds] = [(0.0, 0.0)] * len(groups)
    for scenario in scenarios:
        rows = [next(row for row in group if row["scenario"] == scenario) for group in groups]
        values = seed_values(rows, name)
        for index in range(len(rows)):
            new = _regret(values, index, sign, confidence)
            found[index] = _larger(found[index], new)
    return found


def _larger(a: Bounds, b: Bounds) -> Bounds:
    low = None if a[0] is None or b[0] is None else max(a[0], b[0])
    high = None if a[1] is None or b[1] is None else max(a[1], b[1])
    return _UNKNOWN if low is None or high is None else (low, high)


def _regret(values: SeedValues, index: int, sign: float, confidence: float) -> Bounds:
    import numpy as np

    pairs = differences(values, index)
    others = np.arange(len(values.values)) != index
    half = pairs.half_widths(confidence)[others]
    mean = pairs.mean[others]
    if np.isnan(half).any():
        return _UNKNOWN
    if not values.column.log:
        low, high = (float((sign * mean + way * half).max()) for way in (-1, 1))
        return max(low, 0.0), max(high, 0.0)
    own = _interval(values, index, confidence)
    if own is None:
        return _UNKNOWN
    with np.errstate(over="ignore"):
        # f(d)/f(c) at its ends; a smaller ratio is a larger regret where f is minimised
        less, more = (
            float((sign * (1 - np.exp(-(mean + way * sign * half)))).max()) for way in (-1, 1)
        )
    low, high = max(0.0, own[0] * less), max(0.0, own[1] * more)
    return (low, high) if math.isfinite(high) else _UNKNOWN
