"""Section "Pareto front": configurations by two objectives, with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from rayhive.columns import BOUNDS, Row, find_column
from rayhive.metrics.aggregate import is_censored
from rayhive.report.labels import labels
from rayhive.report.page.run_data import RunData
from rayhive.report.page.svg import Chart, Point, limits
from rayhive.report.recommendation import Recommendation
from rayhive.report.table import value_text


@dataclass(frozen=True)
class FrontEntry:
    """Configuration in the list beside the charts.

    Attributes:
        number: Number at its dot.
        label: Configuration.
        style: Class of its dot.
        mark: Why it stands out, in words; empty if it does not.
        values: Texts of its objectives.
    """

    number: int
    label: str
    style: str
    mark: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class FrontCharts:
    """Charts of the rows under one set of conditions.

    Attributes:
        conditions: The conditions in words; empty if the run has only one set.
        objectives: Titles of the objectives.
        charts: One for each pair of objectives, or one for a single objective.
        entries: Configurations that are drawn.
        left_out: Configurations without a value of some objective.
    """

    conditions: str
    objectives: tuple[str, ...]
    charts: tuple[Chart, ...]
    entries: tuple[FrontEntry, ...]
    left_out: tuple[str, ...]


def front_charts(run: RunData) -> list[FrontCharts]:
    """Return the charts for each set of conditions; empty without objectives."""
    if not run.recommendations:
        return []
    return [
        _of_group(run, rows, advice)
        for rows, advice in zip(run.groups, run.advice, strict=True)
        if advice is not None
    ]


def _of_group(run: RunData, rows: Sequence[Row], advice: Recommendation) -> FrontCharts:
    objectives = run.results.objectives
    known = [row for row in rows if all(_number(row, name) is not None for name in objectives)]
    if len(rows) == 1:
        known = []  # one point is no front
    names = labels(known)
    entries = tuple(
        FrontEntry(
            number,
            name,
            _style(row, advice),
            _mark(row, advice),
            tuple(objective_text(row, each) for each in objectives),
        )
        for number, (row, name) in enumerate(zip(known, names, strict=True), 1)
    )
    pairs = list(combinations(objectives, 2)) or [(name, name) for name in objectives]
    charts = [_chart(known, entries, a, b, objectives) for a, b in pairs] if known else []
    return FrontCharts(
        run.condition_text(rows[0]),
        tuple(axis_title(name) for name in objectives),
        tuple(charts),
        entries,
        tuple(str(row["configuration"]) for row in rows if row not in known),
    )


def _chart(
    rows: Sequence[Row],
    entries: Sequence[FrontEntry],
    x: str,
    y: str,
    objectives: Mapping[str, str],
) -> Chart:
    single = x == y
    ends = {name: [v for row in rows for v in _interval(row, name)] for name in (x, y)}
    log = {name: _spans(values) for name, values in ends.items()}
    better = {"minimize": "lower is better", "maximize": "higher is better"}
    chart = Chart(
        f"{y} against {x}" if not single else x,
        f"{len(rows)} configurations by {x}{'' if single else f' and {y}'}, with 95 % intervals; "
        "the numbers are in the list below.",
        x=limits(ends[x], log=log[x]),
        y=(len(rows) + 0.5, 0.5)[::-1] if single else limits(ends[y], log=log[y]),
        x_label=f"{axis_title(x)}, {better[objectives[x]]}",
        y_label="" if single else f"{axis_title(y)}, {better[objectives[y]]}",
        log_x=log[x],
        log_y=False if single else log[y],
        width=460,
        height=max(160, 60 + 22 * len(rows)) if single else 360,
        left=34 if single else 60,
        y_ticks=not single,
    )
    for row, entry in zip(rows, entries, strict=True):
        at = float(row[x] or 0), float(entry.number) if single else float(row[y] or 0)
        ends_x, ends_y = _interval(row, x), _interval(row, y)
        chart.segment((ends_x[0], at[1]), (ends_x[-1], at[1]), f"whisker {entry.style}")
        if not single:
            chart.segment((at[0], ends_y[0]), (at[0], ends_y[-1]), f"whisker {entry.style}")
    if not single:
        chart.line(_steps(rows, x, y, objectives), "front", dots=False)
    placed: list[Point] = []
    for row, entry in zip(rows, entries, strict=True):
        at = float(row[x] or 0), float(entry.number) if single else float(row[y] or 0)
        title = f"{entry.number}: {entry.label}: {', '.join(entry.values)}"
        chart.dot(at, entry.style, title, 4.5 if entry.style.startswith("other") else 6)
        chart.text(at, str(entry.number), "number", *_free_place(chart, at, placed))
    return chart


def _free_place(chart: Chart, at: Point, placed: list[Point]) -> Point:
    """Return the offset of a number beside a dot at which it covers no other number."""
    x, y = chart.to_x(at[0]), chart.to_y(at[1])
    offsets = ((7, -7), (7, 14), (-17, -7), (-17, 14), (16, 4), (-28, 4), (7, -20), (7, 27))
    free = (
        offset
        for offset in offsets
        if all(abs(x + offset[0] - a) > 14 or abs(y + offset[1] - b) > 11 for a, b in placed)
    )
    dx, dy = next(free, offsets[0])
    placed.append((x + dx, y + dy))
    return float(dx), float(dy)


def _steps(rows: Sequence[Row], x: str, y: str, objectives: Mapping[str, str]) -> list[Point]:
    """Return the corners of the front."""
    best = sorted((float(row[x] or 0), float(row[y] or 0)) for row in rows if row["pareto"])
    if len(objectives) > 2:
        return []  # the front of three objectives is no line in the plane of two
    corners: list[Point] = []
    for a, b in best:
        if corners:
            corner = (a, corners[-1][1]) if objectives[x] == "minimize" else (corners[-1][0], b)
            corners.append(corner)
        corners.append((a, b))
    return corners


def _style(row: Row, advice: Recommendation) -> str:
    if row is advice.row:
        return "chosen"
    if row["pareto"]:
        return "onfront"
    return "other bound" if any(is_censored(row, n) for n in advice.objectives) else "other"


def _mark(row: Row, advice: Recommendation) -> str:
    marks = [advice.mark] if row is advice.row else []
    if row["pareto"]:
        marks.append("on the front")
    if any(is_censored(row, name) for name in advice.objectives):
        marks.append("a lower bound, since not every replicate reached the target")
    return ", ".join(marks)


def axis_title(name: str) -> str:
    """Return the name of a column with its unit."""
    column = find_column(name)
    return f"{name} [{column.unit}]" if column is not None and column.unit else name


def objective_text(row: Row, name: str) -> str:
    """Return a value with its interval; an unknown one as "not recorded"."""
    column = find_column(name)
    if column is None or _number(row, name) is None:
        return "not recorded"
    return f"{'≥ ' * is_censored(row, name)}{value_text(row, column)}"


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _interval(row: Row, name: str) -> list[float]:
    """Return the lower bound, the value and the upper bound; the value alone without bounds."""
    value = _number(row, name)
    if value is None:
        return []
    low, high = (_number(row, name + end) for end in BOUNDS)
    column = find_column(name)
    floor = 0.0 if column is not None and column.unit and value > 0 else None
    low = value if low is None else low if floor is None else max(low, floor)
    return [low, value, value if high is None else high]


def _spans(values: Sequence[float]) -> bool:
    """Return whether values span so much that their axis should be logarithmic."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > 20
