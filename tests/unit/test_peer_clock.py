from __future__ import annotations

import pytest

from rayhive.peer import measurements
from rayhive.peer.measurements import TrainingClock


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, as a list of one number that a test may change."""
    time = [100.0]
    monkeypatch.setattr(measurements.time, "perf_counter", lambda: time[0])
    return time


def test_stands_at_zero_before_the_start(now: list[float]) -> None:
    assert TrainingClock().seconds() == 0.0


def test_counts_from_the_start(now: list[float]) -> None:
    clock = TrainingClock()
    clock.start()
    now[0] += 2.5
    assert clock.seconds() == 2.5


def test_pauses_do_not_count_and_stand_still_meanwhile(now: list[float]) -> None:
    clock = TrainingClock()
    clock.start()
    now[0] += 1
    with clock.paused():
        now[0] += 10
        assert clock.seconds() == 1
    now[0] += 1
    assert clock.seconds() == 2


def test_a_pause_that_ends_in_an_error_ends(now: list[float]) -> None:
    clock = TrainingClock()
    clock.start()
    with pytest.raises(ZeroDivisionError), clock.paused():
        now[0] += 5
        raise ZeroDivisionError
    now[0] += 1
    assert clock.seconds() == 1
