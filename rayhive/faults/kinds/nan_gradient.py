"""A peer whose gradient overflows."""

from __future__ import annotations

import math
from typing import Any

from rayhive.faults.kinds._in_training import InTraining, RoundsArgs


class NanGradient(InTraining):
    """Puts NaN into what a peer has accumulated for a round."""

    about = "The gradient of a peer becomes NaN just before it is averaged."
    Args = RoundsArgs

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Say whether a finite gradient is finite no more."""
        return math.isfinite(what["norm_before"]) and not math.isfinite(what["norm_after"])
