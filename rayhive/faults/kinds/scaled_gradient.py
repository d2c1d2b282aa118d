"""Fault ``scaled_gradient``: the gradient of a peer is far too large."""

from __future__ import annotations

import math
from typing import Any

from rayhive.faults.in_training import InTraining, RoundsArgs, TrainingPeer
from rayhive.faults.kind import Record


class Scaling(RoundsArgs):
    """Parameters of :class:`ScaledGradient`.

    Attributes:
        factor: Multiplier of the gradient.
    """

    factor: float = 1000.0


class ScaledGradient(InTraining):
    """Multiplies a peer's accumulated gradients, as a loss that is a sum and no mean does."""

    about = "The gradient of a peer is multiplied, by 1000 unless said otherwise."
    args: Scaling

    def act(self, peer: TrainingPeer) -> Record:
        """Multiply by ``factor``."""
        factor = self.args.factor
        return self.measured(peer.gradients, lambda tensors: [t.mul_(factor) for t in tensors])

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Return whether the norm grew by the factor."""
        asked = abs(self.args.factor) * what["norm_before"]
        return asked > 0 and math.isclose(what["norm_after"], asked, rel_tol=1e-3)
