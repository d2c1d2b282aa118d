"""Means with intervals, and percentiles of complete and of censored values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

#: Probability that an interval covers the mean.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """Mean of ``n`` values and, for two values and more, its 95 % interval."""

    mean: float
    low: float | None
    high: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean with Student's t-interval, ``mean ± t(0.975, n - 1) · s / √n``.

    ``s`` is the sample standard deviation. A single value has no interval. The order of the values
    has no influence, not even on the last bit.

    Args:
        values: Independent finite measurements.

    Returns:
        The estimate; None of no values.
    """
    if not values:
        return None
    n = len(values)
    if min(values) == max(values):  # exact; a sum could lose a bit
        same = float(values[0])
        return Estimate(same, same if n > 1 else None, same if n > 1 else None, n)
    from scipy.special import stdtrit  # takes long to import

    mean = fmean(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * deviation / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile by linear interpolation between the two nearest ranks.

    It is the value at rank ``percent / 100 · (n - 1)`` of the sorted values, ranks from 0; None of
    no values.
    """
    if not values:
        return None
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    below = math.floor(rank)
    if rank == below or ordered[below] == ordered[below + 1]:
        return ordered[below]
    return ordered[below] + (rank - below) * (ordered[below + 1] - ordered[below])


@dataclass(frozen=True)
class Time:
    """Time until an event [s]; if ``censored``, a lower bound, since the event was not seen."""

    seconds: float
    censored: bool = False


def censored_percentile(times: Sequence[Time], percent: float) -> Time | None:
    """Return a percentile of times of which some are censored; None of no times.

    The percentile is computed twice, with every censored time at its lower bound and at infinity.
    If both agree, the percentile is known. Otherwise the result is censored, and its lower bound
    is the first of the two.
    """
    low = percentile([time.seconds for time in times], percent)
    if low is None:
        return None
    high = percentile([math.inf if time.censored else time.seconds for time in times], percent)
    return Time(low, censored=low != high)


def known_percentile(times: Sequence[Time], percent: float) -> float | None:
    """Return a percentile [s]; None if it depends on the length of a censored time."""
    found = censored_percentile(times, percent)
    return None if found is None or found.censored else found.seconds
