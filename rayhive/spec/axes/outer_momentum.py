"""Momentum of the outer optimizer of local steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.axes.base import Axis, Values


class OuterMomentum(Axis):
    """Nesterov momentum with which a round applies the averaged progress of local steps; 0 is none.

    The default is that of DiLoCo (arXiv:2311.08105).
    """

    name = "outer_momentum"
    type = float
    default = 0.9
    kind = "number"
    depends_on = ("local_steps",)
    column = Column("outer_momentum", "Nesterov momentum of the outer optimizer of local steps")
    examples = (0.9, 0.0)

    def applies(self, values: Values) -> bool:
        """Return whether there are local steps."""
        return values["local_steps"] is not None

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a value that is no momentum."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < 1:
            yield Problem(key, value, "at least 0 and less than 1")

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the momentum."""
        arguments[self.name] = values[self.name]

    def label(self, value: Any) -> str:
        """Return the momentum."""
        return f"m{value:.4g}"
