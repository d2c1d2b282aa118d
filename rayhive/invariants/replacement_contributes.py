"""Invariant ``replacement_contributes``: late peers contribute to a round."""

from __future__ import annotations

from rayhive.events import GROUPED, Round
from rayhive.invariants.base import Invariant, joins
from rayhive.timeline import Timeline

#: Time limit for the first contribution, from the start of the process [s].
GRACE_S = 20.0


class ReplacementContributes(Invariant):
    """Samples of every late peer enter an average with other peers.

    Exempt are peers that a fault targeted, except for the fault that started them, and peers that
    started less than :data:`GRACE_S` (20) seconds before their end.
    """

    about = "A peer that joins, or replaces one that was lost, contributes to a round."
    of_swarm = True

    def check(self, log: Timeline) -> list[str]:
        """Return the late peers that never contributed."""
        wrong = []
        targeted = {name for fault in log.faults if not joins(fault) for name in fault.targets}
        for name, peer in log.incarnations.items():
            if peer.spawned is None or not peer.joined(log.spec.swarm.peers):
                continue
            if any(e.outcome in GROUPED and e.samples > 0 for e in log.of(Round, name)):
                self.checked += 1
                continue
            lived = (peer.ended or log.end) - peer.spawned
            if lived >= GRACE_S and name not in targeted:
                self.checked += 1
                wrong.append(f"{name}: in no average with other peers in {lived:.1f} s")
        return wrong
