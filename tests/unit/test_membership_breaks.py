"""Breaks of a peer: when it steps out of the rounds, and whether it missed a round."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.membership.heartbeat import HeartbeatService
from rayhive.membership.progress_tracker import BREAK_S, LiveProgressTracker
from rayhive.membership.view import Heartbeat
from tests.unit.clock_fakes import Clock


@pytest.fixture
def tracker(clock: Clock) -> LiveProgressTracker:
    """Return a tracker without a thread that takes part."""
    peer_id: Any = SimpleNamespace(to_bytes=lambda: b"own")
    dht: Any = SimpleNamespace(peer_id=peer_id, client_mode=False)
    tracker = LiveProgressTracker(dht, "run", 64, clock=clock, start=False)
    tracker.take_part(True)
    return tracker


def heard(tracker: LiveProgressTracker, name: str, **fields: Any) -> None:
    heartbeat = Heartbeat(name.encode(), 0.0, version=len(fields), takes_part=True)
    tracker.view.receive(dataclasses.replace(heartbeat, **fields))


def test_only_a_long_break_takes_a_peer_out_until_its_next_batch(
    tracker: LiveProgressTracker, clock: Clock
) -> None:
    tracker.end_batch()
    clock.now += BREAK_S
    tracker.check_break()
    assert tracker.takes_part
    assert tracker.begin_batch() is None
    tracker.end_batch()
    clock.now += 3.0
    tracker.end_batch()  # of a validation: the break goes on
    tracker.check_break()
    assert not tracker.takes_part
    assert tracker.begin_batch() == 3.0
    tracker.take_part(True)
    assert tracker.begin_batch() is None


def test_a_callback_that_fails_ends_no_later_break(
    tracker: LiveProgressTracker, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(service: HeartbeatService, stop: asyncio.Event) -> None:
        await stop.wait()

    monkeypatch.setattr(HeartbeatService, "run", run)
    monkeypatch.setattr(HeartbeatService, "round_trip", lambda service: 0.0)
    first, again = threading.Event(), threading.Event()

    def on_break() -> None:
        if first.is_set():
            again.set()
            return
        first.set()
        raise OSError("the user's log is full")

    tracker.start()
    tracker.follow(lambda *_: None, on_break)
    tracker.end_batch()
    clock.now += BREAK_S + 1.0
    assert first.wait(20.0) and not tracker.takes_part
    tracker.take_part(True)
    tracker.end_batch()
    clock.now += BREAK_S + 1.0
    assert again.wait(20.0) and not tracker.takes_part
    tracker.shutdown(5.0)


def test_the_time_before_the_first_batch_does_not_count_for_the_speed(
    tracker: LiveProgressTracker,
) -> None:
    tracker.performance_ema.timestamp -= 100.0  # start, first contact, download of a state
    tracker.report_local_progress(0, 32)
    tracker.report_local_progress(0, 64)
    assert tracker.view.own.samples_per_second > 32.0


def test_a_peer_that_computes_never_steps_out(tracker: LiveProgressTracker, clock: Clock) -> None:
    clock.now += 100.0
    tracker.check_break()
    tracker.end_batch()
    tracker.begin_batch()
    clock.now += 100.0
    tracker.check_break()
    assert tracker.takes_part


def test_a_peer_that_does_not_take_part_does_not_return_by_itself(
    tracker: LiveProgressTracker, clock: Clock
) -> None:
    """It loads a state, or leaves."""
    tracker.take_part(False)
    tracker.end_batch()
    clock.now += 100.0
    tracker.check_break()
    assert tracker.begin_batch() is None


@pytest.mark.parametrize("kind", ["averaged", "synchronised"])
def test_a_peer_that_averages_in_the_background_stays(
    tracker: LiveProgressTracker, clock: Clock, kind: str
) -> None:
    """It is in the group of the other peers."""
    tracker.enter(1)
    other = "averaged" if kind == "synchronised" else "synchronised"
    tracker.has_ended(other, 1, met=True)
    tracker.end_batch()
    clock.now += 100.0
    tracker.check_break()
    assert tracker.takes_part
    tracker.has_ended(kind, 1, met=True)
    tracker.check_break()
    assert not tracker.takes_part


@pytest.mark.parametrize(
    ("other", "missed"),
    [
        ({"round": 3, "averaged": 3}, False),
        ({"round": 4, "averaged": 4}, True),
        ({"round": 4, "averaged": 4, "takes_part": False, "away": True}, True),
        ({"round": 4, "averaged": 4, "takes_part": False}, False),
        ({"round": 4, "averaged": 3}, False),  # it averages in the background
        ({"round": 5, "averaged": 4}, True),
    ],
)
def test_a_round_is_missed_when_other_peers_have_averaged_it(
    tracker: LiveProgressTracker, other: dict[str, Any], missed: bool
) -> None:
    tracker.jump_to(3)
    heard(tracker, "a", **other)
    assert tracker.swarm.has_missed(4, timeout=5.0) is missed


@pytest.mark.parametrize(
    ("met", "now", "over"),
    [
        (3, {}, False),
        (4, {}, True),
        (4, {"takes_part": False, "away": True}, True),
        (4, {"takes_part": False}, False),
    ],
    ids=["not met", "takes part", "on a break", "left"],
)
def test_a_round_is_over_when_other_peers_have_averaged_it_in_a_group(
    tracker: LiveProgressTracker, met: int, now: dict[str, Any], over: bool
) -> None:
    heard(tracker, "a", round=4, averaged=4, met_averaged=met, **now)
    assert tracker.swarm.was_met(4) is over


@pytest.mark.parametrize(("away", "waits"), [(False, False), (True, True)])
def test_the_wait_for_the_news_of_a_met_round_ends_when_all_others_have_left(
    tracker: LiveProgressTracker, away: bool, waits: bool
) -> None:
    class Waited(Exception):
        pass

    def waited() -> None:
        raise Waited

    heard(tracker, "a", round=3, averaged=3)
    heard(tracker, "a", round=3, averaged=3, takes_part=False, away=away)
    with pytest.raises(Waited) if waits else nullcontext():
        assert not tracker.swarm.wait_until_met(4, 60.0, waited)


def test_the_wait_for_the_end_of_a_missed_round_can_be_ended(tracker: LiveProgressTracker) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    heard(tracker, "a", round=3, averaged=4)  # it averages round 4
    with pytest.raises(KeyboardInterrupt):
        tracker.swarm.has_missed(4, timeout=60.0, check=interrupted)
