"""Invariant ``parameters_finite``: no parameter becomes NaN or infinite."""

from __future__ import annotations

import math

from rayhive.events import Evaluation, Weights
from rayhive.invariants.base import Invariant
from rayhive.timeline import Timeline


class ParametersFinite(Invariant):
    """The fingerprint of every peer after every round, and every evaluated loss, are finite."""

    about = "The parameters of every peer are finite after every round."

    def check(self, log: Timeline) -> list[str]:
        """Return the peers with parameters or a held-out loss that are not finite."""
        wrong = []
        for event in log.events:
            if isinstance(event, Weights):
                self.checked += 1
                if not event.finite:
                    wrong.append(f"{event.peer}: not finite after round {event.round}")
            elif isinstance(event, Evaluation):
                self.checked += 1
                loss = event.values.get("loss", 0.0)
                if not math.isfinite(loss):
                    wrong.append(f"{event.peer}: loss {loss} after round {event.round}")
        return wrong
