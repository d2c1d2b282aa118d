"""Ratios of times that were measured side by side in one run, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Ratio(NamedTuple):
    """Ratio of medians and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio_interval(
    slow: Sequence[float] | np.ndarray, fast: Sequence[float] | np.ndarray, draws: int = 2000
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the ratio of medians, slow over fast."""
    generator = np.random.default_rng(0)

    def medians(values: Sequence[float] | np.ndarray) -> np.ndarray:
        drawn: np.ndarray = np.median(generator.choice(values, (draws, len(values))), axis=1)
        return drawn

    low, high = np.percentile(medians(slow) / medians(fast), [2.5, 97.5])
    return float(low), float(high)


def ratio(slow: Sequence[float] | np.ndarray, fast: Sequence[float] | np.ndarray) -> Ratio:
    """Return the ratio of medians, slow over fast, with its interval."""
    value = float(np.median(slow) / np.median(fast))
    return Ratio(value, *ratio_interval(slow, fast))


def paired_ratio(
    slow: Sequence[float] | np.ndarray, fast: Sequence[float] | np.ndarray, draws: int = 2000
) -> Ratio:
    """Return the median of the ratios slow over fast, pair by pair, with its interval.

    For times taken in turns, close together, so that other load affects both of a pair.
    """
    ratios = np.asarray(slow) / np.asarray(fast)
    generator = np.random.default_rng(0)
    drawn = np.median(generator.choice(ratios, (draws, len(ratios))), axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))
