"""Fault ``nan_gradient``: the gradient of a peer overflows."""

from __future__ import annotations

import math
from typing import Any

from rayhive.faults.in_training import InTraining, RoundsArgs, Tensors, TrainingPeer
from rayhive.faults.kind import Record


class NanGradient(InTraining):
    """Fills the largest tensor of a peer's accumulated gradients with NaN."""

    about = "The gradient of a peer becomes NaN just before it is averaged."
    args: RoundsArgs

    def act(self, peer: TrainingPeer) -> Record:
        """Fill one tensor, as an overflow in one layer does."""
        return self.measured(peer.gradients, _fill_largest)

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Return whether a norm that was finite is not finite any more."""
        return math.isfinite(what["norm_before"]) and not math.isfinite(what["norm_after"])


def _fill_largest(gradients: Tensors) -> None:
    max(gradients, key=lambda gradient: gradient.numel()).fill_(math.nan)
