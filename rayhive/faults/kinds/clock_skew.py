"""Fault ``clock_skew``: the clock of a peer is wrong."""

from __future__ import annotations

from typing import Any

from rayhive.faults.in_training import InTraining, TrainingPeer
from rayhive.faults.kind import Record
from rayhive.spec import Model


class Skew(Model):
    """Parameters of :class:`ClockSkew`.

    Attributes:
        seconds: Offset of the clock; negative if it is behind [s].
    """

    seconds: float = 30.0


class ClockSkew(InTraining):
    """Offsets the DHT clock of a peer, from the planned round on."""

    about = "The DHT clock of a peer is ahead or behind."
    group = "clock"
    skews_clock = True
    args: Skew

    def act(self, peer: TrainingPeer) -> Record:
        """Set the offset."""
        return dict(peer.skew_clock(self.args.seconds))

    def took_effect(self, what: dict[str, Any]) -> bool:
        """Return whether the clock is off by ``seconds``, within 10 ms."""
        return bool(abs(what["off_after_s"] - self.args.seconds) < 0.01)
