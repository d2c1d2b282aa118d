"""Neighbours of a peer in a large swarm: the next peers on a few rings.

Every ring holds all peers in an order of its own, which follows from their ids, so peers with the
same members name the same neighbours without a message. A few random rings form an expander: a
message that every peer passes on to its neighbours reaches all of n peers within O(log n) hops, and
the peers that watch one peer are spread over the swarm. The arrangement is that of Rapid (Suresh et
al., "Stable and Consistent Membership at Scale with Rapid", 2018).
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

#: Number of rings.
RINGS = 4


@functools.lru_cache(maxsize=1 << 14)
def _place(ring: int, peer: bytes) -> bytes:
    """Return the place of a peer on a ring."""
    return hashlib.blake2b(peer, digest_size=8, key=bytes([ring])).digest()


class Rings:
    """The rings of some peers.

    Args:
        peers: Ids of the peers, which all can be called.
    """

    def __init__(self, peers: Iterable[bytes]) -> None:
        self.peers = frozenset(peers)
        self._rings = [
            sorted((_place(ring, peer), peer) for peer in self.peers) for ring in range(RINGS)
        ]

    def successors(self, peer: bytes) -> frozenset[bytes]:
        """Return the peers that come after a peer on the rings, at most one from each.

        Args:
            peer: Its id; it need not be on the rings itself.
        """
        return self._next(peer, 1)

    def predecessors(self, peer: bytes) -> frozenset[bytes]:
        """Return the peers that come before a peer on the rings, at most one from each."""
        return self._next(peer, -1)

    def neighbours(self, peer: bytes) -> frozenset[bytes]:
        """Return the peers next to a peer on the rings."""
        return self.successors(peer) | self.predecessors(peer)

    def _next(self, peer: bytes, step: int) -> frozenset[bytes]:
        found: set[bytes] = set()
        for number, ring in enumerate(self._rings):
            key = (_place(number, peer), peer)
            at = bisect_right(ring, key) if step > 0 else bisect_left(ring, key) - 1
            if ring:
                found.add(ring[at % len(ring)][1])
        return frozenset(found - {peer})
