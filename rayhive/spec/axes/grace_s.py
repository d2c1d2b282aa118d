"""Wait of a quorum for further peers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.axes.base import Axis, Values
from rayhive.spec.model import LONGEST_S
from rayhive.spec.swarm import SwarmConfig


class GraceS(Axis):
    """Time for which a round awaits peers that still compute once its quorum is there [s]."""

    name = "grace_s"
    type = float
    default = 1.0
    kind = "number"
    depends_on = ("min_peers",)
    column = Column("grace_s", "Wait of a round's quorum for further peers", unit="s")
    examples = (0.5, 2.0)

    def applies(self, values: Values) -> bool:
        """Return whether rounds have a quorum."""
        return values["min_peers"] is not None

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a value that is no time."""
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 <= value <= LONGEST_S:
            yield Problem(key, value, f"a number of seconds, at least 0 and at most {LONGEST_S:g}")

    def conflicts(self, value: Any, swarm: SwarmConfig) -> Iterator[str]:
        """Find waits after which the others go on in any case."""
        if isinstance(value, (int, float)) and value >= swarm.straggler_timeout:
            yield f"less than swarm.straggler_timeout ({swarm.straggler_timeout:g} s)"

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the time."""
        arguments[self.name] = values[self.name]

    def label(self, value: Any) -> str:
        """Return the time."""
        return f"{value:g} s"
