"""A peer whose gradient is far too large."""

from __future__ import annotations

import math
from typing import Any

from rayhive.faults.kinds._in_training import InTraining, RoundsArgs


class Scaling(RoundsArgs):
    """Parameters of the kind.

    Attributes:
        factor: What the gradient is multiplied by.
    """

    factor: float = 1000.0


class ScaledGradient(InTraining):
    """Multiplies what a peer has accumulated for a round."""

    about = "The gradient of a peer is multiplied, by 1000 unless said otherwise."
    Args = Scaling

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Say whether the norm has grown by the factor."""
        asked = abs(self.args.factor) * what["norm_before"]
        return asked > 0 and math.isclose(what["norm_after"], asked, rel_tol=1e-3)
