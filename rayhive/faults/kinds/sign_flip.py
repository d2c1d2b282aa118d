"""Fault ``sign_flip``: a peer contributes the negative of its gradient."""

from __future__ import annotations

from typing import Any

from rayhive.faults.in_training import InTraining, RoundsArgs, TrainingPeer
from rayhive.faults.kind import Record


class SignFlip(InTraining):
    """Negates a peer's accumulated gradients: it ascends the loss instead of descending."""

    about = "The gradient of a peer points the other way."
    args: RoundsArgs

    def act(self, peer: TrainingPeer) -> Record:
        """Negate the gradients."""
        return self.measured(peer.gradients, lambda tensors: [t.neg_() for t in tensors])

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Return whether the gradient is opposite to its original."""
        return bool(what["cosine"] < -0.999)
