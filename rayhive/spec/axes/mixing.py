"""Share of the local value in the parameters that a peer goes on from after a round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.axes.base import Axis, Values


class Mixing(Axis):
    """Share of the local value in the parameters that a peer goes on from after a round.

    None moves local parameters by as much as the round has moved the outer ones, which keeps the
    progress made during a delayed round. Streaming DiLoCo (arXiv:2501.18512) mixes with 0.5.
    """

    name = "mixing"
    type = float | None
    default = None
    kind = "number"
    depends_on = ("local_steps",)
    column = Column("mixing", "Share of local values in the parameters after a round")
    examples = (0.25, 0.5)

    def applies(self, values: Values) -> bool:
        """Return whether there are local steps."""
        return values["local_steps"] is not None

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a value that is no share."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and (not number or not 0 <= value < 1):
            yield Problem(key, value, "at least 0 and less than 1, or null for no mixing")

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the share."""
        arguments[self.name] = values[self.name]

    def label(self, value: Any) -> str:
        """Return the share, or nothing without mixing."""
        return "" if value is None else f"mix{value:.4g}"
