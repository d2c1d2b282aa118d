"""Ratios of variants that ran in turns, from one pair of values per repetition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats


def ratio_of_runs(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of the pairs' ratios and its 95 % interval (Student's t).

    Args:
        above: One value per repetition.
        below: Value of the other variant in the same repetition.

    Raises:
        ValueError: Fewer than two pairs, which have no interval.
    """
    if len(above) < 2:
        raise ValueError("an interval needs at least two repetitions")
    logs = np.log(np.asarray(above) / np.asarray(below))
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
    low, middle, high = np.exp([logs.mean() - half, logs.mean(), logs.mean() + half])
    return float(middle), float(low), float(high)


def ratio_of_turns(
    above: Sequence[float] | np.ndarray, below: Sequence[float] | np.ndarray, draws: int = 2000
) -> tuple[float, float, float]:
    """Return the ratio of the sums and its 95 % bootstrap interval, drawing pairs.

    For many short turns, close together, so that other load affects both of a pair.

    Args:
        above: One value per turn.
        below: Value of the other variant in the neighbouring turn.
        draws: Number of bootstrap samples.
    """
    over, under = np.asarray(above), np.asarray(below)
    drawn = np.random.default_rng(0).integers(0, len(over), (draws, len(over)))
    ratios = over[drawn].sum(axis=1) / under[drawn].sum(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(over.sum() / under.sum()), float(low), float(high)
