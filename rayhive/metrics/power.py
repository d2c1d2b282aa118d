"""Number of replicates that shows a difference of two rows, and the difference that some show.

Two rows are compared by Student's t for the pairs of n common seeds. With a true difference δ and a
standard deviation σ of the pairs' differences, the statistic has a noncentral t-distribution with
n - 1 degrees of freedom and noncentrality δ·√n / σ (Cohen, *Statistical Power Analysis for the
Behavioral Sciences*, chapter 2).
"""

from __future__ import annotations

import math

#: Probability with which the wanted difference is to be found.
POWER = 0.8
#: Level of the test.
LEVEL = 0.05
#: Points of the numerical integration. scipy's noncentral t is NaN for 2 pairs and large effects.
_NODES = 4000
#: Most replicates that are tried.
MOST = 10_000


def power(n: int, effect: float, level: float = LEVEL) -> float:
    """Return the probability that n pairs show a difference.

    Args:
        n: Pairs, at least 2.
        effect: True difference / standard deviation of the pairs' differences.
        level: Level of the two-sided test.
    """
    import numpy as np
    from scipy.special import chdtri, ndtr, stdtrit  # takes long to import

    # given s/σ, a quantile of the root of chi-square / (n - 1), the statistic's numerator is normal
    scale = np.sqrt(chdtri(n - 1, (np.arange(_NODES) + 0.5) / _NODES) / (n - 1))
    edge = float(stdtrit(n - 1, 1 - level / 2)) * scale
    shift = abs(effect) * math.sqrt(n)
    return float(np.mean(ndtr(shift - edge) + ndtr(-shift - edge)))


def replicates_needed(effect: float, level: float = LEVEL) -> int | None:
    """Return the fewest replicates that show a difference with :data:`POWER` (80 %).

    None if even :data:`MOST` do not. ``effect`` and ``level`` are those of :func:`power`.
    """
    if power(MOST, effect, level) < POWER:
        return None
    low, high = 1, 2
    while power(high, effect, level) < POWER:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle, effect, level) >= POWER else (middle, high)
    return high


def shown_effect(n: int, level: float = LEVEL) -> float | None:
    """Return the smallest effect that n replicates show with :data:`POWER` (80 %).

    None for a single replicate.
    """
    if n < 2:
        return None
    from scipy.optimize import brentq

    top = 1.0
    while power(n, top, level) < POWER:
        top *= 2
    return float(brentq(lambda effect: power(n, effect, level) - POWER, 0.0, top, xtol=1e-6))
