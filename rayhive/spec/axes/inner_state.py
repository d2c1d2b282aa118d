"""Statistics of the optimizer that makes local steps, after a round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from rayhive.columns import Column
from rayhive.errors import Problem, unknown
from rayhive.spec.axes.base import Axis, Values

InnerStateName = Literal["keep", "reset", "average"]


class InnerState(Axis):
    """What a round does with the statistics (moments) of the optimizer that makes local steps.

    ``keep`` leaves each peer its own, as DiLoCo does, ``reset`` drops them, and ``average``
    averages them over the peers, in float32, with the pseudo-gradients.
    """

    name = "inner_state"
    type = InnerStateName
    default = "keep"
    kind = "choice"
    depends_on = ("local_steps",)
    column = Column(
        "inner_state", "Statistics of the optimizer of local steps after a round", type="text"
    )
    examples = ("keep", "reset")

    def applies(self, values: Values) -> bool:
        """Return whether there are local steps."""
        return values["local_steps"] is not None

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find an unknown choice."""
        known = get_args(InnerStateName)
        if not isinstance(value, str) or value not in known:
            yield unknown(key, value, known)

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the choice."""
        arguments[self.name] = values[self.name]

    def label(self, value: Any) -> str:
        """Return the choice, or nothing where the statistics stay."""
        return "" if value == "keep" else str(value)
