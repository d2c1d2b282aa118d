"""A peer that climbs where the others descend."""

from __future__ import annotations

from typing import Any

from rayhive.faults.kinds._in_training import InTraining, RoundsArgs


class SignFlip(InTraining):
    """Turns the sign of what a peer has accumulated for a round."""

    about = "The gradient of a peer points the other way."
    Args = RoundsArgs

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Say whether the gradient is opposite to what it was."""
        return bool(what["cosine"] < -0.999)
