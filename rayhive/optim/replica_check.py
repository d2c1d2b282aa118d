"""Comparison of replicas: whether the peers of a group hold the same training state.

Complete rounds of gradients leave parameters and optimizer statistics equal to the bit
(:mod:`rayhive.averaging.answers`), so parameters need no averaging as long as nothing goes wrong.
Each peer announces an exact fingerprint of its state with every round of gradients. Peers of a
group compare the same announcements, and therefore decide the same. Unequal hardware rounds
differently: once fingerprints have differed, peers announce a digest, too, and average their
parameters only if these are farther apart than rounding explains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple
from itertools import combinations
from typing import Any

from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.averaging.tensor_summary import Digest, fingerprint

#: Relative distance up to which unequal hardware may let replicas drift apart.
DRIFT = 1e-6
#: The same where the parameters' codec leaves a difference after each averaging.
LOSSY_DRIFT = 0.05
#: Rounds after a difference in which digests are announced.
WATCHED_ROUNDS = 3


class ReplicaCheck:
    """Announces the state of a peer's replica, and compares the announcements of a group.

    Args:
        averager: Owner of the replica.
    """

    def __init__(self, averager: RayhiveStateAverager) -> None:
        self._averager, self._tolerance = averager, LOSSY_DRIFT if averager.lossy else DRIFT
        self._differed_in = -WATCHED_ROUNDS

    def announcement(self, round_: int) -> list[Any] | None:
        """Return fingerprint and digest of the replica, the digest only where it may be needed.

        Args:
            round_: The round that is about to be averaged.

        Returns:
            None while background work may change the replica.
        """
        tensors = self._averager.replicated_tensors()
        if tensors is None:
            return None
        watched = round_ <= self._differed_in + WATCHED_ROUNDS
        return [fingerprint(tensors), list(astuple(Digest.of(tensors))) if watched else None]

    def differ(self, round_: int, announcements: Iterable[list[Any] | None]) -> bool:
        """Return whether the replicas of a group are farther apart than the tolerance.

        Args:
            round_: The round that was averaged.
            announcements: One of each peer of the group.
        """
        known = [announced for announced in announcements if announced is not None]
        if len({exact for exact, _ in known}) <= 1:
            return False
        self._differed_in = round_
        if any(digest is None for _, digest in known):
            return True
        digests = [Digest(*digest) for _, digest in known]
        return any(a.distance(b) > self._tolerance for a, b in combinations(digests, 2))
