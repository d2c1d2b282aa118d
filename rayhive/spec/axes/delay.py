"""Averaging that runs in the background while peers compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from rayhive.columns import Column
from rayhive.errors import Problem, unknown
from rayhive.spec.axes.base import Axis, Values

DelayName = Literal["none", "state", "optimizer", "gradients"]

#: Flags of ``hivemind.Optimizer`` for each delay. Of the sixteen combinations of these flags only
#: four are valid; the last two need the offloaded optimizer.
DELAY_FLAGS: dict[str, dict[str, bool]] = {"none": {}, "state": {"delay_state_averaging": True}}
DELAY_FLAGS["optimizer"] = {
    **DELAY_FLAGS["state"],
    "delay_optimizer_step": True,
    "offload_optimizer": True,
}
DELAY_FLAGS["gradients"] = {**DELAY_FLAGS["optimizer"], "delay_grad_averaging": True}


class Delay(Axis):
    """Part of a round that runs in the background; each choice includes those before it."""

    name = "delay"
    type = DelayName
    default = "none"
    kind = "choice"
    column = Column("delay", "Work that runs in the background", type="text")
    examples = ("none", "gradients")

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find an unknown delay."""
        if not isinstance(value, str) or value not in DELAY_FLAGS:
            yield unknown(key, value, DELAY_FLAGS)

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the flags."""
        arguments.update(DELAY_FLAGS[values[self.name]])

    def label(self, value: Any) -> str:
        """Return the part that is delayed, or nothing if none is."""
        return "" if value == "none" else f"delay-{value}"
