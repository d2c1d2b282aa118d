"""Quorum: the peers with which a round begins, although others still compute."""

from __future__ import annotations

from dataclasses import dataclass

#: Default time that a round waits for the rest once its quorum is there [s].
GRACE_S = 1.0


@dataclass(frozen=True)
class Quorum:
    """Smallest group of a round, and the wait for further peers.

    Attributes:
        min_peers: Peers that have to be there. A round always has more than half of the live
            peers, because two groups of one round would make replicas differ.
        grace_s: Time that the round waits for peers that still compute once these are there [s].
    """

    min_peers: int
    grace_s: float = GRACE_S

    def size(self, live: int) -> int:
        """Return the smallest size of a group among this many live peers."""
        return min(live, max(self.min_peers, live // 2 + 1))
