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
    points = notice_points(load_results(folder).folded)
    if not points:
        raise RayhiveError(f"{folder}: no replicate of a preempt-notice-SECONDS scenario finished")
    return points


def notice_points(rows: Iterable[Mapping[str, Any]]) -> list[GridPoint]:
    """Return the grid of rows of the results table, sorted; empty without such scenarios."""
    points = [point for row in rows if (point := _point(row)) is not None]
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
