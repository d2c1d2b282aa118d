"""Learning rate of the outer optimizer of local steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.axes.base import Axis, Values
from rayhive.spec.model import MOST


class OuterLR(Axis):
    """Learning rate with which a round applies the averaged progress of local steps.

    1 without momentum sets the parameters of all peers to their mean. The default is that of DiLoCo
    (arXiv:2311.08105).
    """

    name = "outer_lr"
    type = float
    default = 0.7
    kind = "number"
    depends_on = ("local_steps",)
    column = Column("outer_lr", "Learning rate of the outer optimizer of local steps")
    examples = (0.7, 1.0)

    def applies(self, values: Values) -> bool:
        """Return whether there are local steps."""
        return values["local_steps"] is not None

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a value that is no learning rate."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value <= MOST:
            yield Problem(key, value, "a number greater than 0")

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the learning rate."""
        arguments[self.name] = values[self.name]

    def label(self, value: Any) -> str:
        """Return the learning rate."""
        return f"lr{value:.4g}"
