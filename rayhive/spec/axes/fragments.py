"""Parts of the parameters that rounds of local steps average in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.axes.base import Axis, Values, is_whole
from rayhive.spec.model import MOST


class Fragments(Axis):
    """Parts of the parameters, of which each round averages one; 1 averages all in each round.

    Rounds come as many times more often, so that each part is averaged as often as without it. This
    is Streaming DiLoCo (arXiv:2501.18512). PowerSGD keeps its factors for whole rounds.
    """

    name = "fragments"
    type = int
    default = 1
    kind = "integer"
    depends_on = ("local_steps", "powersgd_rank")
    column = Column(
        "fragments", "Parts of the parameters that rounds of local steps average", type="count"
    )
    examples = (1, 2)

    def applies(self, values: Values) -> bool:
        """Return whether there are local steps, and no factors."""
        return values["local_steps"] is not None and values["powersgd_rank"] is None

    def needs(self) -> str:
        """Return the condition."""
        return "local_steps, and with powersgd_rank"

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a value that is no number of parts."""
        if not is_whole(value, 1, MOST):
            yield Problem(key, value, f"a whole number, at least 1 and at most {MOST}")

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the number of parts."""
        arguments[self.name] = values[self.name]

    def label(self, value: Any) -> str:
        """Return the number of parts, or nothing for one."""
        return "" if value == 1 else f"{value} fragments"
