"""Training time: seconds since training started, without evaluation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class TrainingClock:
    """Stopwatch that can be paused: evaluation belongs to the measurement, not to training."""

    def __init__(self) -> None:
        self._started: float | None = None
        self._paused_s = 0.0
        self._pause_began: float | None = None

    def start(self) -> None:
        """Start at zero."""
        self._started = time.perf_counter()
        self._paused_s = 0.0

    def seconds(self) -> float:
        """Return the training time [s]; 0 before the start."""
        if self._started is None:
            return 0.0
        now = self._pause_began if self._pause_began is not None else time.perf_counter()
        return now - self._started - self._paused_s

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock in the body."""
        self._pause_began = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - self._pause_began
            self._pause_began = None
