"""Claims: the last lines of a benchmark, with the measured value and the verdict.

``claim: TEXT, at least 0.97x: 0.981x (95 % 0.975-0.988): held``

A value without an interval, such as the largest of some, ends in ``(no interval)``.

A claim without a number, for example that bytes are equal, is ``claim: TEXT: held``. A script that
cannot measure on this machine prints ``skipped: REASON`` instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_CLAIM = re.compile(
    r"claim: (?P<promise>.+?)"
    r"(?:: (?P<measurement>[^:]*\((?:95 % [^:]*|no interval)\)))?: (?P<not>not )?held",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Claim:
    """Claim and its measurement.

    Args:
        text: The claim, without the bound and without a full stop.
        measured: Measured value, usually a ratio.
        low: Lower end of its 95 % interval; the value itself where there is none.
        high: Upper end.
        unit: Unit, printed after the numbers; ``x`` for a ratio.
        bound: Allowed limit of the value.
        at_least: Whether the limit is the smallest allowed value; otherwise it is the largest.
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
        """Text with the bound."""
        unit = _suffix(self.unit)
        return f"{self.text}, at {'least' if self.at_least else 'most'} {self.bound:g}{unit}"

    @property
    def measurement(self) -> str:
        """Measured value with its interval, or without one if both ends are the value."""
        low, high = _number(self.low), _number(self.high)
        interval = "no interval" if self.low == self.high else f"95 % {low}-{high}"
        return f"{_number(self.measured)}{_suffix(self.unit)} ({interval})"

    def __str__(self) -> str:
        return f"claim: {self.promise}: {self.measurement}: {_verdict(self.held)}"


def print_claims(*claims: Claim) -> None:
    """Print one line for each claim."""
    for claim in claims:
        print(claim, flush=True)


def print_fact(text: str, held: bool) -> None:
    """Print the line of a claim without a number."""
    print(f"claim: {text}: {_verdict(held)}", flush=True)


class Verdict(NamedTuple):
    """Claim that was parsed from the output of a benchmark.

    Attributes:
        promise: The claim with its bound.
        measurement: Measured value with its interval; empty for a claim without a number.
        held: Whether the claim held.
    """

    promise: str
    measurement: str
    held: bool


def parse_claims(lines: Iterable[str]) -> list[Verdict]:
    """Return the claims in the output of a benchmark."""
    matches = filter(None, (_CLAIM.fullmatch(line.strip()) for line in lines))
    return [Verdict(m["promise"], m["measurement"] or "", not m["not"]) for m in matches]


def parse_skip(lines: Iterable[str]) -> str | None:
    """Return the reason why a benchmark skipped this machine; None if it measured."""
    reasons = [line.strip() for line in lines if line.startswith("skipped: ")]
    return reasons[-1].removeprefix("skipped: ") if reasons else None


def _verdict(held: bool) -> str:
    return "held" if held else "not held"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _suffix(unit: str) -> str:
    return unit if unit in ("", "x", "%") else f" {unit}"
