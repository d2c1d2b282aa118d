"""Fault ``stale_gradient``: a peer contributes the gradient of an earlier round."""

from __future__ import annotations

from collections import deque
from typing import Any

from pydantic import Field

from rayhive.faults.in_training import InTraining, RoundsArgs, Tensors, TrainingPeer
from rayhive.faults.kind import Record
from rayhive.spec.fault_plan import PlannedFault


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

    def __init__(self, planned: PlannedFault) -> None:
        super().__init__(planned)
        #: Round and mean gradients of the present round and of those before it.
        self._past: deque[tuple[int, Tensors]] = deque(maxlen=self.args.age + 1)

    def observe(self, peer: TrainingPeer, round_: int) -> None:
        """Keep the gradients."""
        self._past.append((round_, [gradient * peer.scale for gradient in peer.gradients]))

    def forget(self) -> None:
        """Drop the gradients that were kept last."""
        self._past.pop()

    def act(self, peer: TrainingPeer) -> Record | None:
        """Copy the old gradients over the present ones; wait if the peer has no old ones yet."""
        age = min(self.args.age, len(self._past) - 1)
        if not age:
            return None
        of_round, means = self._past[-1 - age]

        def replace(gradients: Tensors) -> None:
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean / (peer.scale or 1.0))

        return {"of_round": of_round, **self.measured(peer.gradients, replace)}

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Return whether the gradient is another one, of an earlier round."""
        return "of_round" in what and what["cosine"] < 0.9999
