"""Invariant ``parameters_finite``: no parameter becomes NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rayhive.events import Event
from rayhive.invariants.base import Invariant
from rayhive.spec.replicate import ReplicateSpec


class ParametersFinite(Invariant):
    """The fingerprint of every peer after every round, and every evaluated loss, are finite."""

    about = "The parameters of every peer are finite after every round."

    def check(self, spec: ReplicateSpec, events: Sequence[Event]) -> list[str]:
        """Return the peers with parameters or a held-out loss that are not finite."""
        wrong = []
        for event in events:
            if event["kind"] == "weights":
                self.checked += 1
                if not event["finite"]:
                    wrong.append(f"{event['peer']}: not finite after round {event['round']}")
            elif event["kind"] == "evaluation":
                self.checked += 1
                loss = event["values"].get("loss", 0.0)
                if not math.isfinite(loss):
                    wrong.append(f"{event['peer']}: loss {loss} after round {event['round']}")
        return wrong
