"""Time that a test sets."""

from __future__ import annotations


class Clock:
    """Clock that stands still until a test changes ``now`` [s]."""

    now = 100.0

    def __call__(self) -> float:
        return self.now
