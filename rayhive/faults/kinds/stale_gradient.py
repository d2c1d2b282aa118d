"""A peer that sends what it has sent before."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rayhive.faults.kinds._in_training import InTraining, RoundsArgs


class Staleness(RoundsArgs):
    """Parameters of the kind.

    Attributes:
        age: How many rounds old the gradient is; older ones than the peer has are its oldest.
    """

    age: int = Field(default=5, ge=1)


class StaleGradient(InTraining):
    """Replaces what a peer has accumulated by what it had some rounds ago."""

    about = "A peer contributes its gradient of some rounds ago."
    Args = Staleness

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Say whether it is another gradient, of an earlier round."""
        return "of_round" in what and what["cosine"] < 0.9999
