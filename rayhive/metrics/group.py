"""Interface of a metric group: declared columns, and their computation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from rayhive.columns import Column, Row, Stage
from rayhive.metrics.folds import Mean, Total
from rayhive.timeline import Timeline


class MetricGroup:
    """Columns that are computed together.

    A subclass implements a method for each stage that its columns name. The class docstring
    defines every column: its formula and its unit.

    Attributes:
        columns: Declarations of the columns; no other group has a column with one of their names.
    """

    columns: ClassVar[tuple[Column, ...]]

    @classmethod
    def names(cls, stage: Stage) -> tuple[str, ...]:
        """Return the names of the columns of one stage."""
        return tuple(column.name for column in cls.columns if column.stage == stage)

    def compute(self, timeline: Timeline) -> Row:
        """Return the columns of stage ``replicate``; None if the events do not determine it.

        Args:
            timeline: Events of the replicate.
        """
        return {}

    def compare(self, row: Row, twin: Row) -> Row:
        """Return the columns of stage ``twin``.

        Args:
            row: Columns of a replicate with faults.
            twin: Columns of the no-fault replicate of the same configuration and seed.
        """
        return {}

    def rank(self, rows: Sequence[Row], objectives: Mapping[str, str], by: Sequence[str]) -> None:
        """Set the columns of stage ``run`` in every row.

        Args:
            rows: Folded rows of a run, changed in place. The columns are None before.
            objectives: Column to ``minimize`` or ``maximize``; empty without objectives.
            by: Configuration columns that make a row; empty for all of them.
        """


#: Geometric mean with its interval, of times, rates and ratios.
GEOMETRIC = Mean(interval=True, log=True)
#: Columns that a study can optimise, folded to a mean with its interval.
minimized = partial(Column, better="minimize", fold=Mean(interval=True))
maximized = partial(Column, better="maximize", fold=Mean(interval=True))
#: Columns that a study can optimise, folded to a geometric mean with its interval.
minimized_factor = partial(Column, better="minimize", fold=GEOMETRIC)
maximized_factor = partial(Column, better="maximize", fold=GEOMETRIC)
#: Column that is folded to a mean with interval, and that a study cannot optimise.
measured = partial(Column, fold=Mean(interval=True))
#: Column that is folded to a mean without interval.
averaged = partial(Column, fold=Mean())
#: Column of counts, folded to their sum.
total = partial(Column, type="count", fold=Total())


def finite(value: float | None) -> float | None:
    """Return ``value``, or None in place of NaN and infinities."""
    return value if value is not None and math.isfinite(value) else None


def number(row: Row, name: str) -> float | None:
    """Return a numeric cell; None if it is empty or a text."""
    value = row[name]
    return value if isinstance(value, (int, float)) else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the quotient; None if an operand is None or the denominator 0, or if it overflows."""
    if numerator is None or denominator is None or denominator == 0:
        return None
    return finite(numerator / denominator)


def difference(row: Row, twin: Row, name: str) -> float | None:
    """Return one column of a replicate less that of its twin; None if one of them is not known."""
    value, base = number(row, name), number(twin, name)
    return None if value is None or base is None else value - base
