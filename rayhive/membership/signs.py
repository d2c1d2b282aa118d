"""Signs of life of other peers besides their messages: bulk data that arrive or are acknowledged.

On a slow link a heartbeat may take long beside bulk data, and an averager's process receives the
data, not the one that judges. The times are therefore in memory that both processes share.
"""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Callable

import numpy as np

#: Number of peers whose signs are kept; the oldest sign makes room.
SLOTS = 1024
#: Shortest time between two notes about one peer [s].
RESOLUTION_S = 0.1


class SignsOfLife:
    """Times of the last signs of life, written by one process and read by all that it shares with.

    It is made before the processes fork.

    Args:
        clock: Monotonic time of all processes of the machine [s].
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, memory = clock, mmap.mmap(-1, 16 * SLOTS)
        self._keys = np.frombuffer(memory, np.uint64, SLOTS)
        self._times = np.frombuffer(memory, np.float64, SLOTS, 8 * SLOTS)
        self._times[:] = -np.inf
        self._noted: dict[bytes, float] = {}

    def note(self, peer: bytes) -> None:
        """Note that a peer lives now."""
        now = self._clock()
        if now - self._noted.get(peer, -np.inf) < RESOLUTION_S:
            return
        self._noted[peer] = now
        key = _key(peer)
        slots = np.flatnonzero(self._keys == key)
        slot = slots[0] if len(slots) else np.argmin(self._times)
        self._keys[slot], self._times[slot] = key, now

    def last(self, peer: bytes) -> float:
        """Return the time of a peer's last sign of life [s]; minus infinity if there was none."""
        return float(np.max(self._times[self._keys == _key(peer)], initial=-np.inf))

    def newest(self) -> float:
        """Return the time of the last sign of life of any peer [s]."""
        return float(self._times.max())


def _key(peer: bytes) -> np.uint64:
    digest = hashlib.blake2b(peer, digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "big"))
