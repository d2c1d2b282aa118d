"""Means with intervals, and percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

#: Probability that an interval covers the mean.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` values and, from two values on, its 95 % interval."""

    mean: float
    low: float | None
    high: float | None
    n: int


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean with Student's t-interval, ``mean ± t(0.975, n - 1) · s / √n``.

    ``s`` is the sample standard deviation. One value has no interval; none has no mean. The
    order of the values does not matter, not even in the last bit.

    Args:
        values: Independent finite measurements.
    """
    if not values:
        return None
    n = len(values)
    if min(values) == max(values):  # exactly, where rounding in a sum could lose a bit
        same = float(values[0])
        return Estimate(same, same if n > 1 else None, same if n > 1 else None, n)
    mean = fmean(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = _t_quantile((1 + CONFIDENCE) / 2, n - 1) * deviation / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def _t_quantile(probability: float, degrees: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile by linear interpolation between the two nearest ranks.

    The value at rank ``percent / 100 · (n - 1)`` of the sorted values, ranks from 0; None of
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
    """A time until something was seen [s]; if ``censored``, it was not, and took longer."""

    seconds: float
    censored: bool = False


def censored_percentile(times: Sequence[Time], percent: float) -> Time | None:
    """Return a percentile of times of which some are censored; None of no times.

    It is taken twice, with every censored time as short as it can be (what was seen of it) and as
    long (infinite). Where both agree, the percentile is known; else it is censored, and at least
    the first.
    """
    low = percentile([time.seconds for time in times], percent)
    if low is None:
        return None
    high = percentile([math.inf if time.censored else time.seconds for time in times], percent)
    return Time(low, censored=low != high)
