"""Time that a test sets."""

from __future__ import annotations

import pytest


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()
