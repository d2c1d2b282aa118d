"""Pictures of benchmarks, drawn as the charts of a report, in files of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment

from rayhive.report.page.svg import Chart, Point, limits

#: Colours of a light page; the pictures stand on a white ground everywhere.
COLOURS = ("#0b62a3", "#b4480f", "#1d7a4f", "#8a3f8f", "#7a6a00", "#44525e")
_TEMPLATE = Path(__file__).with_name("picture.svg.jinja")


def write_lines(
    path: Path, title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[Point]]
) -> None:
    """Draw lines over two logarithmic axes into an SVG file.

    Args:
        path: The file.
        title: Description for screen readers.
        x_label: Name and unit of the horizontal axis.
        y_label: Name and unit of the vertical axis.
        lines: Points of each line by its name. The second half of the lines has the colours of
            the first half, and is dashed.
    """
    points = [point for line in lines.values() for point in line]
    chart = Chart(
        title=title,
        about="; ".join(lines),
        x=limits([x for x, _ in points], log=True),
        y=limits([y for _, y in points], log=True),
        x_label=x_label,
        y_label=y_label,
        log_x=True,
        log_y=True,
        width=560,
        height=340,
    )
    half = (len(lines) + 1) // 2
    legend = []
    for number, (label, line) in enumerate(lines.items()):
        style = f"c{number % half}" + (" dashed" if number >= half else "")
        chart.line(line, style, dots=False)
        for point in line:
            chart.dot(point, f"c{number % half}", size=3)
        legend.append((style, label))
    _write(path, chart, legend)


@dataclass(frozen=True)
class Interval:
    """A row of a picture of intervals.

    Attributes:
        label: Name of the row.
        value: Mean; None if there is none.
        ends: Bounds of the interval; None if there is none.
        style: Class of its colour, as ``c0``.
        note: Text in place of a missing value.
    """

    label: str
    value: float | None
    ends: Point | None
    style: str
    note: str = ""


def write_intervals(path: Path, title: str, x_label: str, rows: Sequence[Interval]) -> None:
    """Draw a mean and its interval in each row, over a logarithmic axis, into an SVG file.

    Args:
        path: The file.
        title: Description for screen readers.
        x_label: Name and unit of the axis.
        rows: The rows, from top to bottom.
    """
    ends = [end for row in rows for end in (row.value, *(row.ends or ())) if end is not None]
    left = 16 + 6.2 * max(len(row.label) for row in rows)
    chart = Chart(
        title=title,
        about="; ".join(row.label for row in rows),
        x=(limits(ends, log=True)[0], 1.7 * max(ends)),  # room for the last number
        y=(-(len(rows) - 0.4), 0.6),
        x_label=x_label,
        y_label="",
        log_x=True,
        width=left + 430,
        height=22 * len(rows) + 52,
        left=left,
        y_ticks=False,
    )
    for number, row in enumerate(rows):
        chart.row_label(-number, row.label)
        if row.value is None:
            chart.text((chart.x[0], -number), row.note, "note", dx=8, dy=4)
            continue
        if row.ends is not None:
            low, high = row.ends
            chart.segment((low, -number), (high, -number), row.style)
        chart.dot((row.value, -number), row.style)
        far = row.ends[1] if row.ends is not None else row.value
        chart.text((far, -number), f"{row.value:.3g}", "note", dx=8, dy=4)
    _write(path, chart, [])


def _write(path: Path, chart: Chart, legend: Sequence[tuple[str, str]]) -> None:
    template = Environment(autoescape=True).from_string(_TEMPLATE.read_text())
    path.write_text(template.render(c=chart, legend=legend, colours=COLOURS))
