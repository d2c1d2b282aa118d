"""Goodput against the length of the notice before a preemption."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayhive.columns import Row
from rayhive.errors import RayhiveError
from rayhive.metrics.aggregate import ran, row_key, rows_by
from rayhive.report.labels import condition_text, distinct
from rayhive.report.numbers import estimate_text
from rayhive.report.results import load_results

#: Names of the scenarios of the grid, which end with the length of the notice [s].
SCENARIO = re.compile(r"preempt-notice-(\d+(?:\.\d+)?)s?")


@dataclass(frozen=True)
class GridPoint:
    """Goodput of one configuration with one length of notice.

    Attributes:
        configuration: Name of the configuration. It has the conditions that differ within the
            grid, and a number where the names of two configurations are equal.
        notice_s: Length of the notice [s].
        n: Number of replicates that finished.
        ran: Number of replicates that ran, failed and pruned ones included.
        goodput: Committed / computed samples, the mean over the replicates.
        low: Lower end of its 95 % interval; None without one.
        high: Upper end.
        retention: Capacity-normalised retention, the mean; None without twins.
        samples_lost: Lost samples of all replicates together.
    """

    configuration: str
    notice_s: float
    n: int
    ran: int
    goodput: float
    low: float | None
    high: float | None
    retention: float | None
    samples_lost: int | None

    @property
    def complete(self) -> bool:
        """Whether every replicate finished: the numbers are those of the finished ones."""
        return self.n == self.ran

    @property
    def goodput_text(self) -> str:
        """Goodput with its interval, and how many of the replicates finished if not all did."""
        half = None if self.low is None or self.high is None else (self.high - self.low) / 2
        text = estimate_text(self.goodput, half)
        return text if self.complete else f"{text} ({self.n}/{self.ran})"


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


def notice_points(rows: Iterable[Row]) -> list[GridPoint]:
    """Return the grid of rows of the results table, sorted; empty without such scenarios.

    Rows that differ in the scenario alone have one name.
    """
    known = [row for row in rows if _notice_s(row) is not None and row["goodput"] is not None]
    groups = rows_by(known, [name for name in row_key() if name != "scenario"])
    names = distinct([_name(group[0], known) for group in groups])
    points = [_point(row, name) for name, rows in zip(names, groups, strict=True) for row in rows]
    return sorted(points, key=lambda point: (point.configuration, point.notice_s))


def _notice_s(row: Row) -> float | None:
    match = SCENARIO.fullmatch(str(row["scenario"]))
    return None if match is None else float(match[1])


def _name(row: Row, rows: Iterable[Row]) -> str:
    where = condition_text(row, rows, without=("scenario",))
    return ", ".join(filter(None, (str(row["configuration"]), where)))


def _point(row: dict[str, Any], name: str) -> GridPoint:
    return GridPoint(
        configuration=name,
        notice_s=_notice_s(row) or 0.0,
        n=row["n"] or 0,
        ran=ran(row),
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
        lines.append(
            f"| {point.configuration} | {point.notice_s:g} | {point.n} "
            f"| {point.goodput_text} "
            f"| {'-' if point.retention is None else estimate_text(point.retention, None)} "
            f"| {'-' if point.samples_lost is None else point.samples_lost} |"
        )
    return lines
