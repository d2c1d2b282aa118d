"""Feedback of the errors of a lossy codec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.registry import CODECS
from rayhive.spec.axes.base import Axis, Values
from rayhive.spec.swarm import SwarmConfig


class ErrorFeedback(Axis):
    """Whether the errors of a lossy codec enter the next round.

    PowerSGD's own error feedback is always on.
    """

    name = "error_feedback"
    type = bool
    default = False
    kind = "choice"
    depends_on = ("codec",)
    column = Column(
        "error_feedback", "Whether the codec's errors enter the next round", type="flag"
    )
    examples = (False, True)

    def applies(self, values: Values) -> bool:
        """Return whether the codec makes errors."""
        codec = values["codec"]
        known = isinstance(codec, str) and codec in CODECS
        return known and CODECS.get(codec).relative_error > 0

    def needs(self) -> str:
        """Return the condition."""
        return "a lossy codec"

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a value that is neither true nor false."""
        if not isinstance(value, bool):
            yield Problem(key, value, "true or false")

    def conflicts(self, value: Any, swarm: SwarmConfig) -> Iterator[str]:
        """Find robust aggregation rules: what they leave out would be owed for ever."""
        if swarm.aggregation != "mean" and value:
            yield f"false with swarm.aggregation {swarm.aggregation}: gradients have to be averaged"

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the option."""
        if values[self.name]:
            arguments[self.name] = True

    def label(self, value: Any) -> str:
        """Return the option, or nothing without it."""
        return "feedback" if value else ""
