"""Clock whose skew can be set while a peer runs, in all of its processes at once."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys
import time

from hivemind.utils import timed_storage


class SkewedClock:
    """Replacement of hivemind's DHT clock with an adjustable offset.

    It has to be installed before any process of the peer is forked.
    """

    def __init__(self) -> None:
        self._offset = multiprocessing.get_context("fork").RawValue(ctypes.c_double, 0.0)

    def __call__(self) -> float:
        """Return this peer's time [s]."""
        return time.time() + float(self._offset.value)

    def install(self) -> None:
        """Replace ``get_dht_time`` in all loaded modules."""
        replaced = timed_storage.get_dht_time
        for module in list(sys.modules.values()):
            if getattr(module, "get_dht_time", None) is replaced:
                module.get_dht_time = self  # type: ignore[attr-defined]

    def set(self, seconds: float) -> dict[str, float]:
        """Set the offset; return the measured offsets before and after [s]."""
        before = timed_storage.get_dht_time() - time.time()
        self._offset.value = seconds
        return {"off_before_s": before, "off_after_s": timed_storage.get_dht_time() - time.time()}
