"""Least fraction that factors must save for a matrix to be factorised."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.axes.base import Axis, Values


class MinCompressionRatio(Axis):
    """Least fraction of a matrix that its factors save; other matrices travel as they are.

    The default is that of hivemind's PowerSGD averager.
    """

    name = "min_compression_ratio"
    type = float
    default = 0.5
    kind = "number"
    depends_on = ("powersgd_rank",)
    payload_argument = "min_compression_ratio"
    column = Column("min_compression_ratio", "Least fraction saved for a matrix to be factorised")
    examples = (0.25, 0.5)

    def applies(self, values: Values) -> bool:
        """Return whether there is a rank."""
        return values["powersgd_rank"] is not None

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a value that is no fraction."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < 1:
            allowed = "at least 0 and less than 1: the fraction saved, not a factor"
            yield Problem(key, value, allowed)

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Add the fraction to the averager that the rank chose."""
        averager = arguments["grad_averager_factory"]
        ratio = values[self.name]
        arguments["grad_averager_factory"] = partial(averager, min_compression_ratio=ratio)

    def label(self, value: Any) -> str:
        """Return the bound."""
        return f"≥{value:.4g}"
