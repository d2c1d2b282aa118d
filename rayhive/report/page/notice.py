"""Chart of the notice grid: goodput against the length of the notice before a preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayhive.report.notice_grid import GridPoint, notice_points
from rayhive.report.page.run_data import RunData
from rayhive.report.page.svg import COLOURS, Chart, limits


@dataclass(frozen=True)
class NoticeChart:
    """Chart of the notice grid.

    Attributes:
        chart: The chart.
        legend: Configuration -> class of its colour.
        partial: Whether a point is hollow: not every replicate finished.
        rows: Configuration, notice [s], replicates and goodput of each point, as texts.
    """

    chart: Chart
    legend: dict[str, str]
    partial: bool
    rows: tuple[tuple[str, str, str, str], ...]


def notices_of(run: RunData) -> NoticeChart | None:
    """Return the chart of a run; None unless it has several lengths of notice."""
    points = notice_points(run.results.folded)
    several = len({point.notice_s for point in points}) > 1
    return notice_chart(points) if several else None


def notice_chart(points: Sequence[GridPoint]) -> NoticeChart:
    """Return the chart of some points, at least one."""
    ends = [[point.low, point.goodput, point.high] for point in points]
    chart = Chart(
        "Goodput against the notice before preemption",
        "Committed / computed samples over the length of the notice, one line for each "
        "configuration, with 95 % intervals; the numbers are in the table below.",
        x=limits((point.notice_s for point in points), zero=True),
        y=limits(value for each in ends for value in each if value is not None),
        x_label="notice [s]",
        y_label="committed / computed samples",
        width=460,
        height=320,
    )
    legend: dict[str, str] = {}
    for number, name in enumerate(dict.fromkeys(point.configuration for point in points)):
        style = legend[name] = f"c{number % COLOURS}"
        curve = [point for point in points if point.configuration == name]
        chart.line([(point.notice_s, point.goodput) for point in curve], style, name, dots=False)
        for point in curve:
            if point.low is not None and point.high is not None:
                top, bottom = (point.notice_s, point.high), (point.notice_s, point.low)
                chart.segment(top, bottom, f"whisker {style}")
            dot = style if point.complete else f"part line {style}"
            chart.dot((point.notice_s, point.goodput), dot, f"{name}: {point.goodput_text}")
    rows = (
        (point.configuration, f"{point.notice_s:g}", str(point.n), point.goodput_text)
        for point in points
    )
    partial = not all(point.complete for point in points)
    return NoticeChart(chart, legend, partial, tuple(rows))
