"""Departure of a peer after a preemption notice, and the counts of its samples."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.events import Event, Round, Transition
from rayhive.peer.measurements import SampleCounts
from rayhive.peer.preemption import MARGIN_S, Preemption
from rayhive.peer.replicate_monitor import ReplicateMonitor
from rayhive.spec import Configuration, SwarmConfig, WorkloadConfig
from rayhive.spec.replicate import PeerSpec
from tests.unit.clock_fakes import Clock

BATCH_S, ROUND_S, EXCHANGE_S = 0.2, 1.0, 0.1
PEER = PeerSpec(
    run_id="run",
    peer=0,
    peers=1,
    workload=WorkloadConfig(name="digits"),
    swarm=SwarmConfig(peers=1),
    configuration=Configuration(),
)


def leaving(clock: Clock, left_s: float | None) -> tuple[Preemption, list[float]]:
    """Return a preemption that has seen a round, and a list for the times of hand-overs."""
    channel: Any = SimpleNamespace(notice=None if left_s is None else clock.now + left_s)
    made = Preemption(channel, clock)
    made.note(Round(round=1, waited_s=EXCHANGE_S, outcome="averaged", samples=3))
    made.note(Transition(round=1, seconds=ROUND_S, update_s=EXCHANGE_S))
    return made, []


def ask(made: Preemption, clock: Clock, pending: int, handed: list[float]) -> bool:
    made.begin_batch()
    clock.now += BATCH_S
    return made.is_due(pending, lambda: handed.append(clock.now))


def test_without_a_notice_no_peer_leaves() -> None:
    clock = Clock()
    made, handed = leaving(clock, None)
    assert not ask(made, clock, 0, handed) and not ask(made, clock, 8, handed) and not handed


def test_a_peer_without_a_deadline_leaves_after_its_round() -> None:
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


def test_only_samples_averaged_after_the_notice_count_as_handed_over() -> None:
    clock = Clock()
    made, _ = leaving(clock, 5.0)
    before = made.handed_over
    for outcome in ("averaged", "partial", "alone", "skipped", "local"):
        made.note(Round(round=2, outcome=outcome, samples=10))
    assert made.handed_over - before == 20


@pytest.mark.parametrize("seed", range(5))
def test_no_sample_is_counted_twice_or_forgotten(seed: int) -> None:
    dice, counts = random.Random(seed), SampleCounts()
    for _ in range(200):
        counts.computed += dice.randrange(5)
        before = counts.pending
        match dice.randrange(3):
            case 0:
                entered = dice.randint(0, before)
                assert counts.enter(entered, counts.computed) == before - entered
                assert counts.pending == 0
            case 1:
                assert counts.drop() == before and counts.pending == 0
        assert counts.computed == counts.entered + counts.lost + counts.pending
        assert min(counts.entered, counts.lost, counts.pending) >= 0


def test_a_round_that_ends_late_counts_the_samples_computed_before_its_transition() -> None:
    counts = SampleCounts()
    counts.computed = 32
    counts.computed += 16  # of the next round
    assert counts.enter(32, computed=32) == 0 and counts.pending == 16


@pytest.mark.parametrize(("handing_over", "lost"), [(True, 32), (False, 0)])
def test_samples_of_a_local_step_are_lost_when_the_peer_leaves(
    handing_over: bool, lost: int
) -> None:
    fit = SimpleNamespace(batch_size=32)
    events: list[Event] = []
    channel = SimpleNamespace(notice=None, emit=events.append)
    monitor = ReplicateMonitor(PEER, fit, channel, {})  # type: ignore[arg-type]
    monitor.count_samples()
    if handing_over:
        optimizer = SimpleNamespace(hand_over=lambda scaler: None)
        trainer: Any = SimpleNamespace(
            strategy=SimpleNamespace(optimizer=optimizer), precision_plugin=SimpleNamespace()
        )
        monitor.hand_over(trainer)
    monitor.on_event("round", {"round": 4, "outcome": "local", "samples": 32})
    (event,) = events
    assert isinstance(event, Round) and (event.samples, event.lost) == (32 - lost, lost)
    assert monitor.samples.pending == 0
