"""A clock that can be put wrong while a peer runs, in all of its processes at once."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import time

from hivemind.utils import timed_storage


class SkewedClock:
    """The time that hivemind's parts of this peer agree on with others, and by how much it is off.

    It has to be made and installed before any process of the peer is forked.
    """

    def __init__(self) -> None:
        self._offset = multiprocessing.get_context("fork").RawValue(ctypes.c_double, 0.0)

    def __call__(self) -> float:
        """Return what this peer takes for the time [s]."""
        return time.time() + float(self._offset.value)

    def install(self) -> None:
        """Have every module that is loaded ask this clock instead of the machine's."""
        replaced = timed_storage.get_dht_time
        for module in list(sys.modules.values()):
            if getattr(module, "get_dht_time", None) is replaced:
                module.get_dht_time = self  # type: ignore[attr-defined]

    def set(self, seconds: float) -> dict[str, float]:
        """Put the clock wrong by so much; return how far off it was before and is now [s]."""
        before = timed_storage.get_dht_time() - time.time()
        self._offset.value = seconds
        return {"off_before_s": before, "off_after_s": timed_storage.get_dht_time() - time.time()}
