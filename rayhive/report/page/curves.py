"""Section "loss": held-out loss against time, samples and bytes, with bands over replicates.

The target is a line. If it is one of another metric, a further chart shows that metric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rayhive.columns import Row
from rayhive.report.labels import labels
from rayhive.report.numbers import number_text
from rayhive.report.page.conditions import target_text
from rayhive.report.page.run_data import CurvePoint, Replicate, RunData, front_first
from rayhive.report.page.svg import COLOURS, Chart, Point, limits

#: Points of a mean curve.
POINTS = 60
Place: TypeAlias = Callable[[CurvePoint], float | None]


def _time(point: CurvePoint) -> float:
    return point.clock_s


def _loss(point: CurvePoint) -> float:
    return point.loss


def _metric(point: CurvePoint) -> float | None:
    return point.metric


_SECONDS = "training time [s]"
#: Axes of the charts of the loss: title, label, and the coordinate of a point.
AXES: tuple[tuple[str, str, Place], ...] = (
    ("Loss against time", _SECONDS, _time),
    ("Loss against samples", "committed samples", lambda point: point.samples),
    ("Loss against bytes", "payload sent by all peers [B]", lambda point: point.payload),
)


@dataclass(frozen=True)
class Legend:
    """Entry of a legend.

    Attributes:
        style: Class of its colour, the same in every chart of the report.
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
        target: The target in words, if a chart has its line; empty otherwise.
    """

    conditions: str
    charts: tuple[Chart, ...]
    missing: tuple[str, ...]
    legend: tuple[Legend, ...]
    left_out: int
    target: str


def loss_charts(run: RunData) -> list[LossCharts]:
    """Return the charts for each set of conditions in which a loss was recorded."""
    styles: dict[str, str] = {}
    if all(len(rows) == 1 for rows in run.groups):  # conditions are compared instead
        rows = [row for row in run.results.folded if _curves(run, row)]
        names = [run.condition_text(row) or str(row["configuration"]) for row in rows]
        return [_of_group(run, rows, names, "", styles)] if rows else []
    found = []
    for rows, advice in zip(run.groups, run.advice, strict=True):
        ordered = [row for row in front_first(rows, advice) if _curves(run, row)]
        if ordered:
            conditions = run.condition_text(rows[0])
            found.append(_of_group(run, ordered, labels(ordered), conditions, styles))
    return found


def _curves(run: RunData, row: Row) -> list[Replicate]:
    return [replicate for replicate in run.of_row(row) if replicate.curve]


def _of_group(
    run: RunData,
    rows: Sequence[Row],
    names: Sequence[str],
    conditions: str,
    styles: dict[str, str],
) -> LossCharts:
    shown = list(rows[:COLOURS])
    curves = [_curves(run, row) for row in shown]
    drawn = list(zip(_styles(names[: len(shown)], styles), names, curves, strict=False))
    target = run.target
    metric = "" if target is None else str(target["metric"])
    line = None if target is None else float(str(target["value"]))
    charts, missing = [], []
    for title, label, place in AXES:
        chart = _chart(
            title, label, "held-out loss", (place, _loss), drawn, line if metric == "loss" else None
        )
        if chart is None:
            missing.append(title)
        else:
            charts.append(chart)
    lined = charts
    if metric not in ("", "loss"):
        title = f"{metric} against time"
        chart = _chart(title, _SECONDS, metric, (_time, _metric), drawn, line)
        lined = [] if chart is None else [chart]
        charts += lined
    return LossCharts(
        conditions,
        tuple(charts),
        tuple(missing),
        tuple(Legend(style, name, len(group), _last(group)) for style, name, group in drawn),
        len(rows) - len(shown),
        target_text(target) if target is not None and lined else "",
    )


def _styles(names: Sequence[str], known: dict[str, str]) -> list[str]:
    """Return a class for each name: the one that it has in other charts, if it is free here.

    Args:
        names: At most :data:`COLOURS` names.
        known: Name -> class so far; the new ones are added.
    """
    found: list[str] = []
    kept = {known[name] for name in names if name in known}
    for name in names:
        style = known.get(name)
        if style is None or style in found:
            free = [each for each in map("c{}".format, range(COLOURS)) if each not in found]
            style = next((each for each in free if each not in kept), free[0])
        found.append(style)
        known.setdefault(name, style)
    return found


def _chart(
    title: str,
    x_label: str,
    y_label: str,
    places: tuple[Place, Place],
    drawn: Sequence[tuple[str, str, Sequence[Replicate]]],
    target: float | None,
) -> Chart | None:
    """Return a chart of the curves; None if the numbers are not recorded.

    Args:
        title: Its title.
        x_label: Name and unit of the horizontal axis.
        y_label: Name of the vertical axis.
        places: Both coordinates of a point.
        drawn: Class, name and replicates of each configuration.
        target: Height of the target's line; None for none.
    """
    groups = [(style, name, _lines(group, *places)) for style, name, group in drawn]
    points = [point for _, _, lines in groups for line in lines for point in line]
    if not points:
        return None
    heights = [y for _, y in points] + ([] if target is None else [target])
    log = min(heights) > 0 and max(heights) / min(heights) > 10
    chart = Chart(
        title,
        f"{title}: one line for each of {len(drawn)} configurations, the mean over its "
        "replicates; the losses at the end are in the table below.",
        x=limits([x for x, _ in points], zero=True),
        y=limits(heights, log=log),
        x_label=x_label,
        y_label=y_label,
        log_y=log,
        width=360,
        height=280,
    )
    if target is not None:
        chart.segment((chart.x[0], target), (chart.x[1], target), "target", f"target: {target:g}")
        chart.text((chart.x[0], target), "target", "axis", 4, -4)
    for style, name, lines in groups:
        _draw(chart, lines, style, name)
    return chart


def _lines(replicates: Sequence[Replicate], x_of: Place, y_of: Place) -> list[list[Point]]:
    """Return the curve of each replicate whose coordinates are all recorded."""
    lines = []
    for replicate in replicates:
        points = [(x_of(point), y_of(point)) for point in replicate.curve]
        known = [(float(x), float(y)) for x, y in points if x is not None and y is not None]
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
