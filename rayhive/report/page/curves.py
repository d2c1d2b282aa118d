"""Section "loss": held-out loss against time, samples and bytes, with bands over replicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rayhive.columns import Row
from rayhive.report.numbers import number_text
from rayhive.report.page.run_data import CurvePoint, Replicate, RunData, front_first, labels
from rayhive.report.page.svg import COLOURS, Chart, Point, limits

#: Points of a mean curve.
POINTS = 60
#: Axes of the charts: title, label, and the coordinate of a point.
AXES: tuple[tuple[str, str, Callable[[CurvePoint], float | None]], ...] = (
    ("Loss against time", "training time [s]", lambda point: point.clock_s),
    ("Loss against samples", "committed samples", lambda point: point.samples),
    ("Loss against bytes", "payload sent by all peers [B]", lambda point: point.payload),
)


@dataclass(frozen=True)
class Legend:
    """Entry of a legend.

    Attributes:
        style: Class of its colour.
        label: Configuration.
        replicates: Number of replicates with a curve.
        last: Loss at the last evaluation, as text.
    """

    style: str
    label: str
    replicates: int
    last: str


@dataclass(frozen=True)
class LossCharts:
    """Charts of the rows under one set of conditions.

    Attributes:
        conditions: The conditions in words; empty if the run has only one set.
        charts: Charts.
        missing: Titles of charts whose numbers are not recorded.
        legend: Configurations that are drawn.
        left_out: Number of configurations that are not drawn.
    """

    conditions: str
    charts: tuple[Chart, ...]
    missing: tuple[str, ...]
    legend: tuple[Legend, ...]
    left_out: int


def loss_charts(run: RunData) -> list[LossCharts]:
    """Return the charts for each set of conditions in which a loss was recorded."""
    if all(len(rows) == 1 for rows in run.groups):  # conditions are compared instead
        rows = [row for row in run.results.folded if _curves(run, row)]
        names = [run.condition_text(row) or str(row["configuration"]) for row in rows]
        return [_of_group(run, rows, names, "")] if rows else []
    found = []
    for rows, advice in zip(run.groups, run.advice, strict=True):
        ordered = [row for row in front_first(rows, advice) if _curves(run, row)]
        if ordered:
            conditions = run.condition_text(rows[0])
            found.append(_of_group(run, ordered, labels(ordered), conditions))
    return found


def _curves(run: RunData, row: Row) -> list[Replicate]:
    return [replicate for replicate in run.of_row(row) if replicate.curve]


def _of_group(
    run: RunData, rows: Sequence[Row], names: Sequence[str], conditions: str
) -> LossCharts:
    shown = list(rows[:COLOURS])
    curves = [_curves(run, row) for row in shown]
    losses = [p.loss for group in curves for each in group for p in each.curve]
    log = min(losses) > 0 and max(losses) / min(losses) > 10
    charts, missing = [], []
    for title, label, place in AXES:
        lines = [_lines(group, place) for group in curves]
        xs = [x for group in lines for line in group for x, _ in line]
        if not xs:
            missing.append(title)
            continue
        chart = Chart(
            title,
            f"{title}: one line for each of {len(shown)} configurations, the mean over its "
            "replicates; the numbers at the end are in the table below.",
            x=limits(xs, zero=True),
            y=limits(losses, log=log),
            x_label=label,
            y_label="held-out loss",
            log_y=log,
            width=360,
            height=280,
        )
        for number, group in enumerate(lines):
            _draw(chart, group, f"c{number}", names[number])
        charts.append(chart)
    legend = tuple(
        Legend(f"c{number}", name, len(group), _last(group))
        for number, (name, group) in enumerate(zip(names, curves, strict=False))
    )
    return LossCharts(conditions, tuple(charts), tuple(missing), legend, len(rows) - len(shown))


def _lines(
    replicates: Sequence[Replicate], place: Callable[[CurvePoint], float | None]
) -> list[list[Point]]:
    """Return the curve of each replicate whose coordinates are all recorded."""
    lines = []
    for replicate in replicates:
        points = [(place(point), point.loss) for point in replicate.curve]
        known = [(float(x), loss) for x, loss in points if x is not None]
        if known and len(known) == len(points):
            lines.append(sorted(known))
    return lines


def _draw(chart: Chart, lines: Sequence[list[Point]], style: str, label: str) -> None:
    """Draw the mean of a configuration's curves, and the band between its extreme replicates."""
    if not lines:
        return
    if len(lines) == 1:
        chart.line(lines[0], style, f"{label}: one replicate")
        return
    begin, end = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
    if end <= begin:
        for line in lines:
            chart.line(line, style, f"{label}: one of {len(lines)} replicates")
        return
    xs = np.linspace(begin, end, POINTS)
    values = np.stack(
        [np.interp(xs, [x for x, _ in line], [loss for _, loss in line]) for line in lines]
    )
    low, mean, high = values.min(axis=0), values.mean(axis=0), values.max(axis=0)
    chart.band(_points(xs, low), _points(xs, high), style)
    chart.line(_points(xs, mean), style, f"{label}: mean of {len(lines)} replicates")


def _points(xs: np.ndarray, ys: np.ndarray) -> list[Point]:
    return [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]


def _last(replicates: Sequence[Replicate]) -> str:
    losses = sorted(each.curve[-1].loss for each in replicates)
    if len(losses) == 1:
        return number_text(losses[0])
    mean = sum(losses) / len(losses)
    return f"{number_text(mean)} ({number_text(losses[0])} to {number_text(losses[-1])})"
