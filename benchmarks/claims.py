"""The last lines of every benchmark: what it claims, what it measured, and whether that held.

``claim: TEXT, at least 0.97x: 0.981x (95 % 0.975-0.988): held``

A script that cannot measure on this machine prints ``skipped: REASON`` instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NUMBER = r"-?(?:\d[\d.]*(?:e[+-]?\d+)?|inf|nan)"
_CLAIM = re.compile(
    rf"^claim: (?P<text>.+), (?P<side>at least|at most) (?P<bound>{_NUMBER})(?P<unit>\D*?): "
    rf"(?P<measured>{_NUMBER})(?P=unit) \(95 % (?P<low>{_NUMBER})-(?P<high>{_NUMBER})\): "
    r"(?:not )?held$"
)


@dataclass(frozen=True)
class Claim:
    """One claim and its measurement.

    Args:
        text: What is claimed, without the bound and without a full stop.
        measured: What was measured, mostly a ratio.
        low: Lower end of its 95 % interval.
        high: Upper end.
        unit: ``x`` for a ratio, otherwise the unit; it is put behind the numbers.
        bound: What was promised.
        at_least: Whether the bound is the smallest allowed value, else it is the largest.
    """

    text: str
    measured: float
    low: float
    high: float
    unit: str
    bound: float
    at_least: bool

    @property
    def held(self) -> bool:
        """Whether the measured value, as it is printed, is on the right side of the bound."""
        measured = float(_number(self.measured))
        return measured >= self.bound if self.at_least else measured <= self.bound

    @property
    def promise(self) -> str:
        """The text with the bound."""
        unit = _suffix(self.unit)
        return f"{self.text}, at {'least' if self.at_least else 'most'} {self.bound:g}{unit}"

    @property
    def measurement(self) -> str:
        """What was measured, with its interval."""
        low, high = _number(self.low), _number(self.high)
        return f"{_number(self.measured)}{_suffix(self.unit)} (95 % {low}-{high})"

    def __str__(self) -> str:
        verdict = "held" if self.held else "not held"
        return f"claim: {self.promise}: {self.measurement}: {verdict}"


def print_claims(*claims: Claim) -> None:
    """Print a line per claim, as the last lines of a benchmark."""
    for claim in claims:
        print(claim, flush=True)


def parse_claims(lines: Iterable[str]) -> list[Claim]:
    """Return the claims among the lines that a benchmark printed."""
    claims = []
    for line in lines:
        match = _CLAIM.match(line.strip())
        if match:
            claims.append(
                Claim(
                    text=match["text"],
                    measured=float(match["measured"]),
                    low=float(match["low"]),
                    high=float(match["high"]),
                    unit=match["unit"].strip(),
                    bound=float(match["bound"]),
                    at_least=match["side"] == "at least",
                )
            )
    return claims


def parse_skip(lines: Iterable[str]) -> str | None:
    """Return why a benchmark could not measure on this machine, or None if it could."""
    reasons = [line.strip() for line in lines if line.startswith("skipped: ")]
    return reasons[-1].removeprefix("skipped: ") if reasons else None


def _number(value: float) -> str:
    return f"{value:.4g}"


def _suffix(unit: str) -> str:
    return unit if unit in ("", "x", "%") else f" {unit}"
