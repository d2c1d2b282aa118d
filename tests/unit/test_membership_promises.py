"""Rounds of peers whose news take a while, in virtual time: their samples, and when they begin."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.membership.progress_view import ProgressView
from rayhive.membership.round_wait import RoundWait
from rayhive.membership.view import Heartbeat, MembershipView
from tests.unit.test_membership_round_wait import heard

BATCH, TARGET = 32, 1024
#: Time between a peer's news of a batch and its decision what to do next [s].
DECIDES_S = 0.001


@dataclass
class Clock:
    """Virtual time, and what happens in it."""

    now: float = 0.0
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), do))

    def run(self) -> None:
        while self._due:
            self.now, _, do = heapq.heappop(self._due)
            do()


class Peer:
    """A peer that computes batches of one length until its round begins."""

    def __init__(
        self,
        clock: Clock,
        name: bytes,
        batch_s: float,
        news_s: float,
        batch: int = BATCH,
        goes_on: bool = False,
    ) -> None:
        self.clock, self.batch_s, self.batch, self.goes_on = clock, batch_s, batch, goes_on
        self.others = list[Peer]()
        own = Heartbeat(name, 0.0, 1, takes_part=True, samples_per_second=batch / batch_s)
        self.view = MembershipView(own, silence=1e9, clock=lambda: clock.now)
        swarm = ProgressView(self.view, TARGET, threading.Event())
        self.wait = RoundWait(swarm, news_s)
        self.news_s, self.announced, self.waits = news_s, 0, False
        self.entered: float | None = None
        self.samples = 0

    def announce(self) -> None:
        told = self.view.own
        self.announced = told.counted_samples
        for other in self.others:
            self.clock.after(self.news_s, lambda other=other: other.hear(told))

    def hear(self, told: Heartbeat) -> None:
        self.view.receive(told)
        if self.waits:
            self.go_on()

    def end_batch(self) -> None:
        samples = self.view.own.samples + self.batch
        aloud, promised = self.wait.news(samples, self.batch, self.announced)
        self.view.announce(aloud, samples=samples, promised=promised)
        if aloud:
            self.announce()
        self.clock.after(DECIDES_S, self.decide)

    def decide(self) -> None:
        seconds = self.wait.seconds(self.batch)
        if seconds:
            if self.view.own.samples > self.announced:
                self.announce()
            self.waits = True
            self.clock.after(seconds, lambda: self.waits and self.go_on(True))
        else:
            self.go_on()

    def go_on(self, at_once: bool = False) -> None:
        """Begin the round if it is due; else another batch, at once or unless this peer waits."""
        if self.wait.swarm.is_round_due:
            self.waits, self.entered = False, self.clock.now
            self.samples = self.view.own.samples
            if self.goes_on:  # and averages in the background
                self.view.announce(round=1, samples=0, promised=0)
                self.announce()
        elif at_once or not self.waits:
            self.waits = False
            self.compute()

    def compute(self) -> None:
        self.clock.after(self.batch_s - DECIDES_S, self.end_batch)


def a_round(
    batch_s: Sequence[float],
    news_s: float,
    batches: Sequence[int] = (BATCH,) * 8,
    goes_on: bool = False,
) -> list[Peer]:
    """Return the peers of a round that all of them have begun.

    Args:
        batch_s: Seconds of each peer's batches.
        news_s: How long news are under way [s].
        batches: Samples of each peer's batches.
        goes_on: Whether peers go on to the next round while they average this one.
    """
    clock = Clock()
    given = enumerate(zip(batch_s, batches, strict=False))
    peers = [
        Peer(clock, bytes([i]), seconds, news_s, batch, goes_on) for i, (seconds, batch) in given
    ]
    for peer in peers:
        peer.others = [other for other in peers if other is not peer]
        for other in peer.others:
            peer.view.receive(other.view.own)
        peer.compute()
    clock.run()
    return peers


SPEEDS = {
    "equal": [0.02] * 4,
    "two at half the speed": [0.014, 0.014, 0.028, 0.028],
    "all different": [0.011, 0.017, 0.023, 0.041],
    "two": [0.01, 0.03],
    "eight": [0.05, 0.07, 0.04, 0.05, 0.09, 0.06, 0.05, 0.08],
    "one very slow": [0.01, 0.01, 0.01, 0.3],
}


@pytest.mark.parametrize("goes_on", [False, True], ids=["waits", "goes on"])
@pytest.mark.parametrize("news_s", [0.0001, 0.01, 0.04, 0.3], ids=str)
@pytest.mark.parametrize("batch_s", SPEEDS.values(), ids=SPEEDS)
def test_a_round_has_its_samples_and_hardly_more(
    batch_s: list[float], news_s: float, goes_on: bool
) -> None:
    peers = a_round(batch_s, news_s, goes_on=goes_on)
    samples = [peer.samples for peer in peers]
    shortest = TARGET / sum(BATCH / seconds for seconds in batch_s)
    assert TARGET <= sum(samples) < TARGET + BATCH * len(peers)
    for peer in peers:
        assert peer.entered is not None
        assert peer.entered <= max(shortest, news_s) + max(batch_s) + 1e-9


@pytest.mark.parametrize("news_s", [0.0001, 0.01, 0.04, 0.3], ids=str)
def test_batches_of_unequal_sizes_end_in_a_round_too(news_s: float) -> None:
    """Their promises need not add up to the round; the peers compute on then."""
    batches = (17, 32, 50, 128)
    peers = a_round([0.01, 0.02, 0.02, 0.07], news_s, batches)
    assert all(peer.entered is not None for peer in peers)
    assert TARGET <= sum(peer.samples for peer in peers) < TARGET + 2 * sum(batches)


# -- the tracker -----------------------------------------------------------------------------------


@pytest.fixture
def tracker() -> LiveProgressTracker:
    """Return a tracker without a thread, beside a peer of its speed; a round has four batches."""
    peer_id: Any = SimpleNamespace(to_bytes=lambda: b"own")
    dht: Any = SimpleNamespace(peer_id=peer_id, client_mode=False)
    tracker = LiveProgressTracker(dht, "run", 4 * BATCH, start=False)
    tracker.take_part(True)
    tracker.report_local_progress(0, BATCH)
    tracker.report_local_progress(0, 2 * BATCH)
    tracker.update_epoch(1)
    speed = tracker.view.own.samples_per_second
    other = Heartbeat(b"other", 0.0, 1, takes_part=True, round=1, samples_per_second=speed)
    tracker.view.receive(other)
    return tracker


def test_a_tracker_promises_and_takes_no_promise_into_another_round(
    tracker: LiveProgressTracker,
) -> None:
    tracker.report_local_progress(1, BATCH)
    assert tracker.view.loud.promised == 2 * BATCH
    for go_on in (tracker.update_epoch, tracker.jump_to, tracker.skip_to):
        go_on(tracker.view.own.round + 1)
        assert tracker.view.own.promised == tracker.view.loud.promised == 0
        tracker.view.restate(promised=2 * BATCH)


def test_a_promise_ends_with_samples_that_are_lost(tracker: LiveProgressTracker) -> None:
    tracker.report_local_progress(1, BATCH)
    tracker.report_local_progress(1, 0)
    assert tracker.view.loud.promised == 0


def test_a_peer_keeps_its_promise_though_another_has_gone_on(tracker: LiveProgressTracker) -> None:
    """The other one averages in the background, and waits there for this peer."""
    tracker.report_local_progress(1, BATCH)
    assert tracker.view.own.promised == 2 * BATCH
    heard(tracker.view, "other", round=2, entered=2, averaged=1)
    assert not tracker.ready_to_update_epoch
    tracker.report_local_progress(1, 2 * BATCH)
    assert tracker.ready_to_update_epoch


def test_a_promise_ends_with_the_round_that_others_have_averaged(
    tracker: LiveProgressTracker,
) -> None:
    tracker.report_local_progress(1, BATCH)
    heard(tracker.view, "other", round=2, entered=2, averaged=2)
    assert tracker.view.own.promised == 2 * BATCH and tracker.ready_to_update_epoch


@pytest.mark.parametrize("promised, aloud", [(2 * BATCH, False), (BATCH, True)])
def test_a_peer_that_begins_a_round_tells_what_the_others_lack(
    tracker: LiveProgressTracker, promised: int, aloud: bool
) -> None:
    tracker.report_local_progress(1, BATCH)
    tracker.report_local_progress(1, 2 * BATCH)
    heard(tracker.view, "other", promised=promised)
    tracker.enter(2)
    assert (tracker.view.loud.entered == 2) == aloud
