"""Fault ``corrupt_state``: a peer serves a corrupt state to joiners."""

from __future__ import annotations

import math
from typing import Any, Literal

from rayhive.faults.in_training import InTraining, Tensors, TrainingPeer
from rayhive.faults.kind import Record
from rayhive.spec import Model


class Corruption(Model):
    """Parameters of :class:`CorruptState`.

    Attributes:
        what: ``nan`` serves NaN, ``scaled`` multiplies all numbers.
        factor: Multiplier of ``scaled``.
    """

    what: Literal["nan", "scaled"] = "nan"
    factor: float = 1000.0


class CorruptState(InTraining):
    """Corrupts every state that a peer serves, from the planned round on."""

    about = "The state that a peer serves to joiners is corrupt; its own parameters are not."
    args: Corruption
    _armed = False

    def act(self, peer: TrainingPeer) -> Record:
        """Arm the peer. Each state that it then serves is a further ``sabotaged`` event."""
        self._armed = True
        return dict(self.args.model_dump())

    def serve(self, tensors: Tensors) -> Tensors | None:
        """Return a corrupt copy of the state once the peer is armed."""
        if not self._armed:
            return None
        factor = math.nan if self.args.what == "nan" else self.args.factor
        return [t * factor if t.is_floating_point() else t for t in tensors]

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Return whether the peer reported that it is armed."""
        return bool(what["act"] == "corrupt_state")
