"""Whoever is started again counts again."""

from __future__ import annotations

from collections.abc import Sequence

from rayhive.events import GROUPED, Event
from rayhive.invariants.base import Invariant, RunLog
from rayhive.spec.replicate import ReplicateSpec

#: Time from its process's start after which a peer must have contributed [s].
GRACE_S = 20.0
#: The kind of fault that is about the peers which it brings.
JOIN = "join"


class ReplacementContributes(Invariant):
    """Samples of every peer that came later enter an average with others.

    A peer to which something else was done, or for which less than :data:`GRACE_S` (20) seconds of
    training were left, may not have come to it.
    """

    about = "A peer that joins, or replaces one that was lost, contributes to a round."

    def check(self, spec: ReplicateSpec, events: Sequence[Event]) -> list[str]:
        """Return the peers that came and never contributed."""
        log = RunLog(spec, events)
        if spec.swarm.use_local_updates:  # gradients are not averaged
            return []
        wrong = []
        for name in log.peers:
            spawned = log.moment(name, "peer_spawned")
            if spawned is None or not log.joined(name):
                continue
            if any(e["outcome"] in GROUPED and e["samples"] > 0 for e in log.of(name, "round")):
                self.checked += 1
                continue
            there = log.ended(name) - spawned
            targeted = any(name in fault.lives and fault.kind != JOIN for fault in log.faults)
            if there >= GRACE_S and not targeted:
                self.checked += 1
                wrong.append(f"{name}: in no average with others in {there:.1f} s")
        return wrong
