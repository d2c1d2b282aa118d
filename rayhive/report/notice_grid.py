"""Goodput against the length of the notice before a preemption."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayhive.errors import RayhiveError
from rayhive.report.numbers import estimate_text
from rayhive.report.results import load_results
from rayhive.report.timeline_picture import import_plotly

#: Names of the scenarios of the grid, which end with the length of the notice [s].
SCENARIO = re.compile(r"preempt-notice-(\d+(?:\.\d+)?)s?")


@dataclass(frozen=True)
class GridPoint:
    """Goodput of one configuration with one length of notice.

    Attributes:
        configuration: Name of the configuration.
        notice_s: Length of the notice [s].
        n: Number of replicates that finished.
        goodput: Committed / computed samples, the mean over the replicates.
        low: Lower end of its 95 % interval; None without one.
        high: Upper end.
        retention: Capacity-normalised retention, the mean; None without twins.
        samples_lost: Lost samples of all replicates together.
    """

    configuration: str
    notice_s: float
    n: int
    goodput: float
    low: float | None
    high: float | None
    retention: float | None
    samples_lost: int | None


def notice_grid(folder: str | Path) -> list[GridPoint]:
    """Return the grid of a run folder, sorted by configuration and length of notice.

    Raises:
        ConfigError: ``folder`` is no run folder.
        RayhiveError: It has no finished replicate of a scenario ``preempt-notice-SECONDS``.
    """
    points = [point for row in load_results(folder).folded if (point := _point(row)) is not None]
    if not points:
        raise RayhiveError(f"{folder}: no replicate of a preempt-notice-SECONDS scenario finished")
    return sorted(points, key=lambda point: (point.configuration, point.notice_s))


def _point(row: Mapping[str, Any]) -> GridPoint | None:
    match = SCENARIO.fullmatch(row["scenario"])
    if match is None or row["goodput"] is None:
        return None
    return GridPoint(
        configuration=row["configuration"],
        notice_s=float(match.group(1)),
        n=row["n"] or 0,
        goodput=row["goodput"],
        low=row["goodput_low"],
        high=row["goodput_high"],
        retention=row["retention_normalised"],
        samples_lost=row["samples_lost"],
    )


def notice_lines(points: Iterable[GridPoint]) -> list[str]:
    """Return the grid as a Markdown table."""
    lines = [
        "| configuration | notice [s] | n | goodput | retention, normalised | samples lost |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for point in points:
        half = None if point.low is None or point.high is None else (point.high - point.low) / 2
        lines.append(
            f"| {point.configuration} | {point.notice_s:g} | {point.n} "
            f"| {estimate_text(point.goodput, half)} "
            f"| {'-' if point.retention is None else estimate_text(point.retention, None)} "
            f"| {'-' if point.samples_lost is None else point.samples_lost} |"
        )
    return lines


def notice_html(points: Iterable[GridPoint]) -> str:
    """Return the grid as one HTML page: goodput and its interval against the notice.

    Raises:
        RayhiveError: plotly is not installed.
    """
    graph = import_plotly("graph_objects")
    points = list(points)
    figure = graph.Figure()
    for name in dict.fromkeys(point.configuration for point in points):
        curve = [point for point in points if point.configuration == name]
        figure.add_trace(
            graph.Scatter(
                x=[point.notice_s for point in curve],
                y=[point.goodput for point in curve],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [_arm(point.high, point.goodput) for point in curve],
                    "arrayminus": [_arm(point.goodput, point.low) for point in curve],
                },
                name=name,
                mode="lines+markers",
            )
        )
    figure.update_layout(
        title="Goodput against the notice before preemption (95 % intervals)",
        template="plotly_white",
        xaxis_title="notice [s]",
        yaxis_title="committed / computed samples",
    )
    return str(figure.to_html(full_html=True, include_plotlyjs=True))


def _arm(high: float | None, low: float | None) -> float:
    return 0.0 if high is None or low is None else high - low
