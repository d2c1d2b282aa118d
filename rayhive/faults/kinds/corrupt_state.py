"""A donor whose state is corrupt."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from rayhive.faults.kinds._in_training import InTraining
from rayhive.spec import Model


class Corruption(Model):
    """Parameters of the kind.

    Attributes:
        what: Whether joiners get NaN, or all numbers multiplied.
        factor: By what.
    """

    rounds: ClassVar[int] = 1  # it lasts
    what: Literal["nan", "scaled"] = "nan"
    factor: float = 1000.0


class CorruptState(InTraining):
    """From the planned round on, whoever asks a peer for the state gets a corrupt one."""

    about = "The state that a peer serves to joiners is corrupt; its own parameters are not."
    Args = Corruption

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Say whether the peer is armed; each state that it serves is a further event."""
        return bool(what["act"] == "corrupt_state")
