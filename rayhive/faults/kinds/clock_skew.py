"""A peer whose clock is wrong."""

from __future__ import annotations

from typing import Any, ClassVar

from rayhive.faults.kinds._in_training import InTraining
from rayhive.spec import Model


class Skew(Model):
    """Parameters of the kind.

    Attributes:
        seconds: How far the clock is ahead; negative if it is behind [s].
    """

    rounds: ClassVar[int] = 1  # it lasts
    seconds: float = 30.0


class ClockSkew(InTraining):
    """From the planned round on, what a peer takes for the swarm's time is off."""

    about = "The clock by which a peer agrees with others on times is off."
    group = "clock"
    Args = Skew

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Say whether the clock has moved by as much as was asked."""
        moved = what["off_after_s"] - what["off_before_s"]
        return bool(abs(moved - self.args.seconds) < 0.01)
