"""Estimate of the remaining duration of a sweep."""

from __future__ import annotations


class Eta:
    """Estimates the remaining duration from the mean duration of the finished replicates.

    Args:
        replicates: Number of replicates in the sweep.
    """

    def __init__(self, replicates: int) -> None:
        self._total = replicates
        self._done = 0
        self._timed = 0
        self._seconds = 0.0

    @property
    def done(self) -> int:
        """Finished replicates."""
        return self._done

    @property
    def total(self) -> int:
        """All replicates."""
        return self._total

    def add(self, seconds: float | None) -> None:
        """Count a finished replicate.

        Args:
            seconds: Its duration [s]; None if unknown.
        """
        self._done += 1
        if seconds is not None:
            self._timed += 1
            self._seconds += seconds

    def remaining_s(self, running_s: float = 0.0) -> float | None:
        """Return the remaining duration [s]; None before the first replicate is timed.

        Args:
            running_s: Time for which the current replicate has been running [s].
        """
        left = max(0, self._total - self._done)
        if not left:
            return 0.0
        if not self._timed:
            return None
        mean = self._seconds / self._timed
        return left * mean - min(running_s, mean)


def clock(seconds: float | None) -> str:
    """Return a duration as text: ``1 h 04 min``, ``3 min 20 s``, ``7 s``."""
    if seconds is None:
        return "unknown"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
