"""The contract of a metric group."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, TypeAlias

if TYPE_CHECKING:
    from rayhive.metrics.timeline import Timeline

#: What a cell holds; None is "not known" or "does not apply", and never stands for zero.
Value: TypeAlias = str | int | float | bool | None
Row: TypeAlias = dict[str, Value]


class MetricGroup(ABC):
    """A group of columns that are computed from one replicate's events.

    The class docstring defines each column: its formula and its unit.

    Attributes:
        columns: Names in :data:`rayhive.columns.BY_NAME` that this group alone fills.
        replicate_columns: Further columns, of ``trials.parquet`` only.
    """

    columns: ClassVar[tuple[str, ...]]
    replicate_columns: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def compute(self, timeline: Timeline) -> Row:
        """Return a value for each column; None where the events do not say."""


def finite(value: float | None) -> float | None:
    """Return ``value``, or None in place of NaN and infinities."""
    return value if value is not None and math.isfinite(value) else None


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the quotient; None where a side is unknown or the denominator is zero."""
    if numerator is None or denominator is None or denominator == 0:
        return None
    return finite(numerator / denominator)
