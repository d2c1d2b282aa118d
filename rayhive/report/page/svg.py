"""Charts as SVG: scales, axes and marks with colours from the page's style sheet.

A chart is a list of :class:`Shape`, which the template ``chart.html`` writes with its texts
escaped. Colours are classes (``c0`` to ``c7``), so that one drawing serves light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rayhive.report.numbers import number_text

#: Number of colours in the style sheet.
COLOURS = 8
#: Points up to which a line has dots, since it may be too short to be seen.
FEW = 3
Point = tuple[float, float]


@dataclass(frozen=True)
class Shape:
    """One element of a drawing.

    Attributes:
        tag: Name of the SVG element.
        attributes: Its attributes.
        text: Its text, for the element ``text``.
        title: Text under the mouse pointer; empty for none.
    """

    tag: str
    attributes: dict[str, str | float]
    text: str = ""
    title: str = ""


@dataclass(frozen=True)
class Scale:
    """Map from values to coordinates, linear or logarithmic.

    Attributes:
        low: Value at ``start``.
        high: Value at ``stop``; larger than ``low``.
        start: First coordinate.
        stop: Last coordinate.
        log: Whether equal ratios have equal lengths; both values are positive then.
    """

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the coordinate of a value, clamped to the scale."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return about ``count`` round values within the scale."""
        if self.log:
            found = _log_ticks(self.low, self.high)
            if len(found) >= 2:
                return found[:: math.ceil(len(found) / (2 * count))]
        step = _round_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(n * step, 12) for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1.0, 2.0, 5.0) if high / low < 300 else (1.0,)
    values = [factor * 10.0**decade for decade in decades for factor in factors]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def _round_step(step: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 and 10 times a power of ten that is not below a step."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(f * power for f in (1.0, 2.0, 2.5, 5.0, 10.0) if f * power >= step * 0.999)


def limits(values: Iterable[float], *, zero: bool = False, log: bool = False) -> Point:
    """Return the ends of a scale that holds all values, with a margin; (0, 1) of no values.

    Args:
        values: Finite values.
        zero: Whether the scale begins with 0.
        log: Whether the scale is logarithmic, so that the margin is a factor.
    """
    found = list(values)
    if not found:
        return (0.0, 1.0) if not log else (1.0, 10.0)
    low, high = min(found), max(found)
    if log:
        margin = max((high / low) ** 0.06, 1.05)
        return low / margin, high * margin
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (0.0 if zero else low - margin), high + margin


@dataclass
class Chart:
    """Drawing area with two axes, to which marks are added.

    Attributes:
        title: Heading of the chart.
        about: Description of the chart for screen readers.
        x: Limits of the horizontal axis.
        y: Limits of the vertical axis.
        x_label: Name and unit of the horizontal axis.
        y_label: Name and unit of the vertical axis.
        log_x: Whether the horizontal axis is logarithmic.
        log_y: Whether the vertical axis is logarithmic.
        width: Width of the drawing.
        height: Height of the drawing.
        left: Space for the labels of the vertical axis.
        y_ticks: Whether the vertical axis has ticks with numbers.
        hatched: Whether the style ``hatched`` is used.
        shapes: Marks in the order of drawing.
    """

    title: str
    about: str
    x: Point
    y: Point
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    width: float = 420
    height: float = 300
    left: float = 56
    y_ticks: bool = True
    hatched: bool = False
    shapes: list[Shape] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.right, self.top, self.bottom = self.width - 10, 12.0, self.height - 40
        self.to_y = Scale(*self.y, self.bottom, self.top, self.log_y)
        if self.y_ticks:
            longest = max((len(tick_text(value)) for value in self._y_ticks()), default=0)
            self.left = max(self.left, 26 + 6.5 * longest)
        self.to_x = Scale(*self.x, self.left, self.right, self.log_x)
        self._axes()

    def line(self, points: Sequence[Point], style: str, title: str = "", dots: bool = True) -> None:
        """Draw a line through points, with dots if there are few and ``dots`` is true."""
        if dots and len(points) <= FEW:
            for point in points:
                self.dot(point, style, title, 3)
        if points:
            path = "M" + "L".join(f"{self.to_x(x):.1f} {self.to_y(y):.1f}" for x, y in points)
            self._add("path", {"class": f"line {style}", "d": path}, title)

    def band(self, low: Sequence[Point], high: Sequence[Point], style: str) -> None:
        """Fill the area between two lines."""
        corners = [*low, *reversed(high)]
        if len(low) > 1:
            path = "M" + "L".join(f"{self.to_x(x):.1f} {self.to_y(y):.1f}" for x, y in corners)
            self._add("path", {"class": f"band {style}", "d": f"{path}Z"})

    def dot(self, at: Point, style: str, title: str = "", size: float = 4.5) -> None:
        """Draw a dot."""
        place: dict[str, str | float] = {"cx": _c(self.to_x(at[0])), "cy": _c(self.to_y(at[1]))}
        self._add("circle", {"class": f"dot {style}", **place, "r": size}, title)

    def segment(self, a: Point, b: Point, style: str, title: str = "") -> None:
        """Draw a straight line between two points."""
        ends: dict[str, str | float] = {
            "x1": _c(self.to_x(a[0])),
            "y1": _c(self.to_y(a[1])),
            "x2": _c(self.to_x(b[0])),
            "y2": _c(self.to_y(b[1])),
        }
        self._add("line", {"class": f"line {style}", **ends}, title)

    def box(self, a: Point, b: Point, style: str, title: str = "") -> None:
        """Fill the rectangle between two corners."""
        xs, ys = (
            sorted((self.to_x(a[0]), self.to_x(b[0]))),
            sorted((self.to_y(a[1]), self.to_y(b[1]))),
        )
        size: dict[str, str | float] = {
            "x": _c(xs[0]),
            "y": _c(ys[0]),
            "width": _c(max(xs[1] - xs[0], 0.6)),
            "height": _c(max(ys[1] - ys[0], 0.6)),
        }
        self._add("rect", {"class": style, **size}, title)

    def text(self, at: Point, text: str, style: str = "", dx: float = 0, dy: float = 0) -> None:
        """Write a text at a point, moved by ``dx`` and ``dy`` units of the drawing."""
        self._write(self.to_x(at[0]) + dx, self.to_y(at[1]) + dy, text, style)

    def row_label(self, y: float, text: str) -> None:
        """Write a text to the left of the vertical axis."""
        self._write(self.left - 6, self.to_y(y) + 4, text, "end")

    def _axes(self) -> None:
        for value in self.to_x.ticks(max(2, int(self.width / 95))):
            x = self.to_x(value)
            self._rule(x, self.top, x, self.bottom)
            self._write(x, self.bottom + 14, tick_text(value), "middle")
        if self.y_ticks:
            for value in self._y_ticks():
                y = self.to_y(value)
                self._rule(self.left, y, self.right, y)
                self._write(self.left - 6, y + 4, tick_text(value), "end")
        middle = (self.left + self.right) / 2
        self._write(middle, self.height - 8, self.x_label, "middle axis")
        if self.y_label:
            at = f"rotate(-90) translate({-(self.top + self.bottom) / 2:.0f} 12)"
            self.shapes.append(
                Shape("text", {"class": "middle axis", "transform": at}, self.y_label)
            )

    def _y_ticks(self) -> list[float]:
        return self.to_y.ticks(max(2, int(self.height / 55)))

    def _rule(self, x1: float, y1: float, x2: float, y2: float) -> None:
        ends = {"x1": _c(x1), "y1": _c(y1), "x2": _c(x2), "y2": _c(y2)}
        self._add("line", {"class": "rule", **ends})

    def _write(self, x: float, y: float, text: str, style: str) -> None:
        self.shapes.append(Shape("text", {"class": style, "x": _c(x), "y": _c(y)}, text))

    def _add(self, tag: str, attributes: dict[str, str | float], title: str = "") -> None:
        self.shapes.append(Shape(tag, attributes, title=title))


def tick_text(value: float) -> str:
    """Return a short text of a round number: thousands and millions with k, M and G."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:g}{letter}"
    return f"{value:g}" if value == 0 or abs(value) >= 1e-3 else number_text(value)


def stretches(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Return the begin and end (exclusive) of each run of true values."""
    edges = [0, *(n for n in range(1, len(flags)) if flags[n] != flags[n - 1]), len(flags)]
    return [(a, b) for a, b in pairwise(edges) if a < b and flags[a]]


def _c(value: float) -> float:
    return round(value, 1)
