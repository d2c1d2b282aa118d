"""Pictures of benchmarks, drawn as the charts of a report, in files of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment

from rayhive.report.page.svg import Chart, Point, limits

#: Colours of a light page; the pictures stand on a white ground everywhere.
COLOURS = ("#0b62a3", "#b4480f", "#1d7a4f", "#8a3f8f", "#7a6a00", "#44525e")
_TEMPLATE = Path(__file__).with_name("lines.svg.jinja")


def write_lines(
    path: Path, title: str, x_label: str, y_label: str, lines: Mapping[str, Sequence[Point]]
) -> None:
    """Draw lines over two logarithmic axes into an SVG file.

    Args:
        path: The file.
        title: What the picture shows, for screen readers.
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
    template = Environment(autoescape=True).from_string(_TEMPLATE.read_text())
    path.write_text(template.render(c=chart, legend=legend, colours=COLOURS))
