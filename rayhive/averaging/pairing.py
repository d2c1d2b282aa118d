"""Pairing: the random pairs of a round, which every peer derives from the membership view.

NoLoCo (Kolehmainen et al., 2025, "NoLoCo: No-all-reduce Low Communication Training Method for Large
Models", arXiv:2506.10911) averages in random pairs instead of over all peers. Peers with equal
views find equal pairs without a message: each sorts the peers by a hash of run, round and id, and
neighbours in this order are a pair.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

#: Peers of a pair.
PAIR = 2


@dataclass(frozen=True)
class Pairing:
    """Division of the peers of a round into pairs.

    Attributes:
        seed: Name of the run, equal for all of its peers.
    """

    seed: str

    def group(self, own: bytes, peers: Iterable[bytes], round_: int) -> frozenset[bytes]:
        """Return the ids of a peer's pair, its own among them.

        The last three of an odd number of peers are one group, so that no peer averages alone.

        Args:
            own: Id of the peer.
            peers: Ids of all peers of the round.
            round_: The round.
        """
        order = sorted({own, *peers}, key=lambda peer: (self._rank(peer, round_), peer))
        last = max(0, len(order) // PAIR - 1)
        begin = PAIR * min(order.index(own) // PAIR, last)
        end = len(order) if begin == PAIR * last else begin + PAIR
        return frozenset(order[begin:end])

    def _rank(self, peer: bytes, round_: int) -> bytes:
        key = f"{self.seed}\0{round_}\0".encode()
        return hashlib.sha256(key + peer).digest()
