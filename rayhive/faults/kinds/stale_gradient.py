"""Fault ``stale_gradient``: a peer contributes the gradient of an earlier round."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rayhive.faults.in_training import InTraining, RoundsArgs, Tensors, TrainingPeer
from rayhive.faults.kind import Record


class Staleness(RoundsArgs):
    """Parameters of :class:`StaleGradient`.

    Attributes:
        age: Age of the contributed gradient [rounds]. A peer with fewer past rounds takes its
            oldest.
    """

    age: int = Field(default=5, ge=1)


class StaleGradient(InTraining):
    """Replaces a peer's accumulated gradients with those of an earlier round."""

    about = "A peer contributes its gradient of some rounds ago."
    args: Staleness

    @property
    def history(self) -> int:
        """The age of the gradient."""
        return int(self.args.age)

    def act(self, peer: TrainingPeer) -> Record | None:
        """Copy the old gradients over the present ones; wait if the peer has no old ones yet."""
        found = peer.past_gradients(self.args.age)
        if found is None:
            return None
        of_round, old = found

        def replace(gradients: Tensors) -> None:
            for gradient, past in zip(gradients, old, strict=True):
                gradient.copy_(past)

        return {"of_round": of_round, **self.measured(peer.gradients, replace)}

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Return whether the gradient is another one, of an earlier round."""
        return "of_round" in what and what["cosine"] < 0.9999
