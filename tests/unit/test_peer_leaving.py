"""When a peer that was given notice leaves, and where each of its samples goes."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.peer.callback import MeasuredTraining
from rayhive.peer.preemption import MARGIN_S, Preemption, Samples

BATCH_S, ROUND_S, EXCHANGE_S = 0.2, 1.0, 0.1


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def leaving(clock: Clock, left_s: float | None) -> tuple[Preemption, list[float]]:
    """Return one that knows the peer's pace, and a list of when it handed over."""
    channel: Any = SimpleNamespace(notice=None if left_s is None else clock.now + left_s)
    made = Preemption(channel, clock)
    made.on_event("round", {"waited_s": EXCHANGE_S, "outcome": "averaged", "samples": 3})
    made.on_event("transition", {"seconds": ROUND_S, "update_s": EXCHANGE_S})
    return made, []


def ask(made: Preemption, clock: Clock, pending: int, handed: list[float]) -> bool:
    made.begin_batch()
    clock.now += BATCH_S
    return made.is_due(pending, lambda: handed.append(clock.now))


def test_without_a_notice_nobody_leaves() -> None:
    clock = Clock()
    made, handed = leaving(clock, None)
    assert not ask(made, clock, 0, handed) and not ask(made, clock, 8, handed) and not handed


def test_who_may_leave_in_its_own_time_leaves_after_its_round() -> None:
    clock = Clock()
    made, handed = leaving(clock, math.inf)
    assert not ask(made, clock, 8, handed)
    assert ask(made, clock, 0, handed) and not handed


def test_it_computes_as_long_as_a_further_round_fits() -> None:
    clock = Clock()
    made, handed = leaving(clock, 15.0)
    assert not ask(made, clock, 0, handed)
    clock.now = 114.0
    assert ask(made, clock, 0, handed) and not handed, "and leaves with nothing pending"


def test_in_the_middle_of_a_round_it_hands_over_before_the_deadline() -> None:
    clock = Clock()
    made, handed = leaving(clock, 3.0)
    while not ask(made, clock, 8, handed):
        assert clock.now < 103.0
    (at,) = handed
    assert 103.0 - at >= BATCH_S + EXCHANGE_S, "with time for the others' batch and the exchange"
    assert 103.0 - at <= 3 * BATCH_S + 2 * EXCHANGE_S + MARGIN_S


def test_without_time_for_anything_it_leaves_at_once() -> None:
    clock = Clock()
    made, handed = leaving(clock, 0.0)
    assert ask(made, clock, 8, handed) and not handed


def test_only_what_is_averaged_after_the_notice_counts_as_handed_over() -> None:
    clock = Clock()
    made, _ = leaving(clock, None)
    made._channel.notice = clock.now + 5
    for outcome in ("averaged", "partial", "alone", "skipped", "local"):
        made.on_event("round", {"waited_s": None, "outcome": outcome, "samples": 10})
    assert made.handed_over == 20


@pytest.mark.parametrize("seed", range(5))
def test_no_sample_is_counted_twice_or_forgotten(seed: int) -> None:
    dice, books = random.Random(seed), Samples()
    for _ in range(200):
        books.computed += dice.randrange(5)
        before = books.pending
        match dice.randrange(3):
            case 0:
                entered = dice.randint(0, before)
                assert books.enter(entered, books.computed) == before - entered
                assert books.pending == 0
            case 1:
                assert books.drop() == before and books.pending == 0
        assert books.computed == books.entered + books.lost + books.pending
        assert min(books.entered, books.lost, books.pending) >= 0


def test_a_round_that_ends_late_counts_what_was_computed_when_it_was_left_behind() -> None:
    books = Samples()
    books.computed = 32
    books.computed += 16  # of the next round
    assert books.enter(32, computed=32) == 0 and books.pending == 16


@pytest.mark.parametrize(("handing_over", "entered"), [(True, 0), (False, 32)])
def test_who_steps_by_itself_and_then_leaves_takes_its_samples_along(
    handing_over: bool, entered: int
) -> None:
    told: list[dict[str, Any]] = []
    samples = Samples()
    samples.computed = 32
    peer: Any = SimpleNamespace(
        clock=SimpleNamespace(seconds=lambda: 1.0),
        samples=samples,
        leaving=SimpleNamespace(on_event=lambda *_: None),
        channel=SimpleNamespace(emit=lambda kind, **fields: told.append(fields)),
        _computed={},
        _handing_over=handing_over,
        _mean_loss=lambda: 0.0,
    )
    MeasuredTraining.on_event(peer, "round", {"round": 4, "outcome": "local", "samples": 32})
    assert (told[0]["samples"], told[0]["lost"]) == (entered, 32 - entered)
    assert samples.pending == 0
