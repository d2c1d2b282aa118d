"""When a sweep will be done, from how long its replicates took."""

from __future__ import annotations


class Eta:
    """Estimates what is left from the mean duration of finished replicates.

    Args:
        replicates: How many there are in all.
    """

    def __init__(self, replicates: int) -> None:
        self._total = replicates
        self._done = 0
        self._timed = 0
        self._seconds = 0.0

    @property
    def done(self) -> int:
        """Replicates finished so far."""
        return self._done

    @property
    def total(self) -> int:
        """Replicates in all."""
        return self._total

    def add(self, seconds: float | None) -> None:
        """Count a finished replicate.

        Args:
            seconds: How long it took; None if that is not known.
        """
        self._done += 1
        if seconds is not None:
            self._timed += 1
            self._seconds += seconds

    def remaining_s(self, running_s: float = 0.0) -> float | None:
        """Return the seconds that are left; None before the first replicate is timed.

        Args:
            running_s: How long the one that runs now has been running.
        """
        left = max(0, self._total - self._done)
        if not left:
            return 0.0
        if not self._timed:
            return None
        mean = self._seconds / self._timed
        return left * mean - min(running_s, mean)


def clock(seconds: float | None) -> str:
    """Return a duration as people say it: ``1 h 04 min``, ``3 min 20 s``, ``7 s``."""
    if seconds is None:
        return "unknown"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
