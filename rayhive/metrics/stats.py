"""Means and medians with intervals, and percentiles of complete and of censored values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

#: Probability that an interval covers the mean.
CONFIDENCE = 0.95
#: Fewest replicates with a distribution-free 95 % interval of the median, and with a rank test or
#: permutation test of pairs that can reach 5 %: ``2 / 2**n <= 0.05``.
LEAST_BY_RANK = 6
#: Logarithm from which a bound counts as unknown.
MAX_LOG = 700.0


@dataclass(frozen=True)
class Estimate:
    """Mean of ``n`` values and, for two values and more, its 95 % interval.

    Bounds that the data do not support are None.
    """

    mean: float
    low: float | None
    high: float | None
    n: int


def estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate | None:
    """Return the mean with Student's t-interval, ``mean ± t(0.975, n - 1) · s / √n``.

    ``s`` is the sample standard deviation. A single value has no interval. The order of the values
    has no influence, not even on the last bit.

    Args:
        values: Independent finite measurements.
        confidence: Probability that the interval covers the mean.

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
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * deviation / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def log_estimate(values: Sequence[float], confidence: float = CONFIDENCE) -> Estimate | None:
    """Return the geometric mean with Student's t-interval on a log scale.

    The interval is ``exp(m ± t(0.975, n - 1) · s / √n)``, where ``m`` and ``s`` are mean and sample
    standard deviation of the logarithms. It covers the geometric mean, which is the median of a
    lognormal distribution. Times and ratios vary by factors; the interval on the linear scale
    covers the mean of lognormal values too rarely, and can reach below 0.

    Args:
        values: Independent finite measurements.
        confidence: Probability that the interval covers the geometric mean.

    Returns:
        The estimate. With a zero among the values the geometric mean is 0 and has no interval; None
        of no values or with a negative one.
    """
    if not values or min(values) < 0:
        return None
    if min(values) == 0 or min(values) == max(values):
        same = float(min(values))
        bound = same if len(values) > 1 and same > 0 else None
        return Estimate(same, bound, bound, len(values))
    found = estimate([math.log(value) for value in values], confidence)
    assert found is not None
    return Estimate(
        math.exp(found.mean),
        None if found.low is None else _exp(found.low),
        None if found.high is None else _exp(found.high),
        found.n,
    )


def _exp(value: float) -> float | None:
    """Return the exponential; None if it overflows, as the bound of two unlike values can."""
    return math.exp(value) if value < MAX_LOG else None


def median_interval(times: Sequence[Time]) -> tuple[float | None, float | None]:
    """Return the 95 % interval of the median of one time for each replicate.

    From :data:`LEAST_BY_RANK` (6) times on it is the distribution-free one of order statistics: the
    k-th smallest and the k-th largest time, where k is the largest number with
    ``2 · P(Binomial(n, 1/2) < k) <= 0.05``. The lower bound takes each censored time as the lower
    bound that it is, the upper bound as infinite, and is None if that time is infinite. Fewer times
    have the interval of :func:`log_estimate` if every one is known and positive; the distribution
    is taken as symmetric on a log scale.

    Returns:
        The bounds; None where the data support none. Times that agree exactly have no interval.
    """
    seconds = [time.seconds for time in times]
    if len(times) < 2 or min(seconds) == max(seconds):
        return None, None
    if len(times) < LEAST_BY_RANK:
        if any(time.censored for time in times):
            return None, None
        found = log_estimate(seconds)
        return (None, None) if found is None else (found.low, found.high)
    from scipy.stats import binom  # takes long to import

    k = int(binom.ppf((1 - CONFIDENCE) / 2, len(times), 0.5))
    low = sorted(seconds)[k - 1]
    high = sorted(math.inf if time.censored else time.seconds for time in times)[len(times) - k]
    return (low if low < math.inf else None), (high if high < math.inf else None)


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


def percentile_bounds(times: Sequence[Time], percent: float) -> tuple[float, float] | None:
    """Return the two bounds of a percentile of times of which some are censored; None of no times.

    It is computed twice, with every censored time at its lower bound and at infinity. Where both
    agree, the percentile is known.
    """
    low = percentile([time.seconds for time in times], percent)
    high = percentile([math.inf if time.censored else time.seconds for time in times], percent)
    return None if low is None or high is None else (low, high)


def censored_percentile(times: Sequence[Time], percent: float) -> Time | None:
    """Return a percentile of times of which some are censored; None of no times.

    It is censored where its bounds (:func:`percentile_bounds`) differ, and is the lower one then.
    """
    bounds = percentile_bounds(times, percent)
    return None if bounds is None else Time(bounds[0], censored=bounds[0] != bounds[1])


def known_percentile(times: Sequence[Time], percent: float) -> float | None:
    """Return a percentile [s]; None if it depends on the length of a censored time."""
    found = censored_percentile(times, percent)
    return None if found is None or found.censored else found.seconds
