"""Numbers for readers, rounded to their significant digits."""

from __future__ import annotations

import math
import re

#: Significant digits of a number without an interval.
SIGNIFICANT = 4
#: Absolute value below which a number is written with an exponent.
SMALL = 1e-3


def number_text(value: float) -> str:
    """Return a number: whole numbers in full, other numbers with four significant digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < SMALL or abs(value) >= 1e15:
        return f"{value:.{SIGNIFICANT - 1}e}"
    decimals = max(0, SIGNIFICANT - 1 - _exponent(value))
    return f"{value:,.{decimals}f}"


def interval_text(value: float, low: float | None, high: float | None) -> str:
    """Return ``value [low, high]`` with three significant digits, ``…`` for an unknown bound.

    A quantity without any bound, and an exact one, whose bounds are the value, is printed alone.
    """
    if (low is None and high is None) or low == high:
        return number_text(value)
    return f"{_rough(value)} [{_rough(low)}, {_rough(high)}]"


def _rough(value: float | None) -> str:
    """Return a number with three significant digits, and no more than its whole part has."""
    if value is None or not math.isfinite(value):
        return "…"
    if value == 0 or SMALL <= abs(value) < 100:
        decimals = 2 - (_exponent(float(f"{value:.2e}")) if value else 2)
        return f"{value:.{decimals}f}"
    rounded = round(value) if abs(value) >= 100 else value
    return f"{rounded:,}" if SMALL <= abs(value) < 1e6 else f"{value:.2e}"


def estimate_text(mean: float, half: float | None) -> str:
    """Return ``mean ± half`` with two significant digits of the half-width.

    An exact quantity, whose interval has no width, is printed without ``± half``.
    """
    if half is None or half == 0 or not math.isfinite(half):
        return number_text(mean)
    half = float(f"{half:.1e}")  # round before counting digits: 0.0996 becomes 0.10
    scale = max(abs(mean), half)
    if scale < SMALL:
        exponent = _exponent(scale)
        decimals = 1 + exponent - _exponent(half)
        factor = 10.0**-exponent
        return f"({mean * factor:.{decimals}f} ± {half * factor:.{decimals}f})e{exponent:03d}"
    decimals = 1 - _exponent(half)
    shown = max(0, decimals)
    return f"{round(mean, decimals):,.{shown}f} ± {round(half, decimals):,.{shown}f}"


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value)))


def with_times_signs(text: str) -> str:
    """Return a recorded text, such as ``2 x x86_64``, as a reader sees it: ``2 × x86_64``."""
    return re.sub(r"(?<=\d) x (?=\S)", " × ", text)
