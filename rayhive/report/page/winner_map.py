"""Section "map": the measured winner over the rate of the links and the rate of failures."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rayhive.report.advice import percent_text
from rayhive.report.numbers import number_text
from rayhive.report.page.conditions import faults_per_hour
from rayhive.report.page.run_data import RunData
from rayhive.report.page.svg import COLOURS, Chart

#: Cells of the map in each direction.
CELLS = 24
_RATE = re.compile(r"([\d.]+(?:e[+-]?\d+)?) Mbit/s")
#: Failure rate at which "none" is drawn, as a share of the smallest measured rate.
NO_FAILURES = 0.1


@dataclass(frozen=True)
class Measured:
    """Winner under one set of conditions.

    Attributes:
        rate_mbit: Rate of the slowest link [Mbit/s].
        failures: Faults per peer and hour of training, as they fired; 0 without faults.
        scenario: Name of the scenario.
        winner: Recommended configuration.
        certainty: Share of the draws in which it is chosen; None if it is not known.
    """

    rate_mbit: float
    failures: float
    scenario: str
    winner: str
    certainty: float | None

    @property
    def certainty_text(self) -> str:
        """Certainty in percent, or that it is not known."""
        return "not known" if self.certainty is None else percent_text(self.certainty)


@dataclass(frozen=True)
class WinnerMap:
    """Map of the winners, or the reason for which there is none.

    Attributes:
        chart: The map; None without one.
        winners: Configuration -> class of its colour.
        points: Measured points.
        reason: Why there is no map; empty with one.
    """

    chart: Chart | None
    winners: dict[str, str]
    points: tuple[Measured, ...]
    reason: str = ""


def winner_map(run: RunData) -> WinnerMap:
    """Return the map, if the run measured at least two link rates and two rates of failures."""
    points = _measured(run)
    rates, failures = ({getattr(p, n) for p in points} for n in ("rate_mbit", "failures"))
    lacking = []
    if len(rates) < 2:
        lacking.append(f"{_count(rates)} of a link (in swarm.node_classes)")
    if len(failures) < 2:
        lacking.append(f"{_count(failures)} of failures (in scenarios)")
    winners = list(dict.fromkeys(point.winner for point in points))
    styles = {name: f"c{n % COLOURS}" for n, name in enumerate(winners)}
    if lacking:
        reason = f"this run has {' and '.join(lacking)}; a map needs two of each"
        return WinnerMap(None, styles, tuple(points), reason)
    return WinnerMap(_chart(points, styles), styles, tuple(points))


def _count(values: set[Any]) -> str:
    return {0: "no measured rate", 1: "one measured rate"}.get(len(values), "measured rates")


def _measured(run: RunData) -> list[Measured]:
    found = []
    for advice in run.recommendations:
        row = advice.row
        rate = None if row is None else link_rate(row.get("link"))
        if row is None or rate is None:
            continue
        failures = faults_per_hour(run, row)
        if failures is not None:
            label = str(row["configuration"])
            found.append(Measured(rate, failures, str(row["scenario"]), label, advice.certainty))
    return found


def link_rate(link: Any) -> float | None:
    """Return the rate of the slowest shaped link in a cell of the column ``link`` [Mbit/s]."""
    rates = [float(each) for each in _RATE.findall(str(link or ""))]
    return min((rate for rate in rates if rate > 0), default=None)


def _chart(points: Sequence[Measured], styles: dict[str, str]) -> Chart:
    least = min(point.failures for point in points if point.failures)
    shown = [(p, p.rate_mbit, p.failures or NO_FAILURES * least) for p in points]
    xs, ys = [x for _, x, _ in shown], [y for *_, y in shown]
    x, y = ((min(values) / 2, max(values) * 2) for values in (xs, ys))
    chart = Chart(
        "The measured winner over link rate and failure rate",
        f"{len(points)} measured points; each cell has the colour of the nearest one, and is "
        "hatched outside the measured range. The points are in the table below.",
        x=x,
        y=y,
        x_label="rate of the slowest link [Mbit/s]",
        y_label="faults per peer and hour",
        log_x=True,
        log_y=True,
        width=640,
        height=380,
        hatched=True,
    )
    for column in range(CELLS):
        for line in range(CELLS):
            a = _between(x, column / CELLS), _between(y, line / CELLS)
            b = _between(x, (column + 1) / CELLS), _between(y, (line + 1) / CELLS)
            middle = math.sqrt(a[0] * b[0]), math.sqrt(a[1] * b[1])
            near = min(shown, key=lambda item: _distance(middle, (item[1], item[2])))
            chart.box(a, b, f"cell {styles[near[0].winner]}")
            if not _inside(middle, xs, ys):
                chart.box(a, b, "hatched")
    for point, px, py in shown:
        place = f"{point.scenario}, {number_text(px)} Mbit/s"
        text = f"{place}: {point.winner}, certainty {point.certainty_text}"
        chart.dot((px, py), f"measured {styles[point.winner]}", text, 7)
        if not point.failures:
            chart.text((px, py), "no faults", "middle", dy=22)
    return chart


def _between(ends: tuple[float, float], share: float) -> float:
    low, high = ends
    return float(low * (high / low) ** share)


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return math.hypot(math.log(a[0] / b[0]), math.log(a[1] / b[1]))


def _inside(at: tuple[float, float], xs: Sequence[float], ys: Sequence[float]) -> bool:
    return min(xs) <= at[0] <= max(xs) and min(ys) <= at[1] <= max(ys)
