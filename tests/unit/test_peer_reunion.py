"""Peers that are lost without a word and come back, and what those who were apart count for."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.averaging.filtered_averager import weights
from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.membership.view import Heartbeat, MembershipView, Reunion
from rayhive.optim.state_sync import StateSync
from tests.unit.compression_fakes import OTHER, PEER

SILENCE = 4.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def heartbeat(name: str, version: int = 1, **fields: object) -> Heartbeat:
    return Heartbeat(name.encode(), 0.0, **{"version": version, "takes_part": True, **fields})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(clock: Clock) -> MembershipView:
    return MembershipView(heartbeat("own"), SILENCE, clock)


def stand_in(view: MembershipView, round_: int) -> None:
    view.own = dataclasses.replace(view.own, round=round_)


def test_a_reunion_tells_who_was_lost_and_since_when(view: MembershipView, clock: Clock) -> None:
    for name in ("a", "b", "c"):
        view.hear(heartbeat(name))
    stand_in(view, 5)
    clock.now += SILENCE + 1
    view.hear(heartbeat("c", 2))
    view.note_losses()
    stand_in(view, 9)
    view.note_losses()
    assert view.take_reunion() is None
    view.hear(heartbeat("a", 2))
    view.hear(heartbeat("b", 2), age=0.5)
    assert view.take_reunion() == Reunion(5, frozenset({b"a", b"b"}))
    assert view.take_reunion() is None, "it is told once"
    assert view.is_here(b"a") and not view.is_here(b"b"), "others' word does not revive"


def test_one_that_has_left_is_not_missed(view: MembershipView, clock: Clock) -> None:
    view.hear(heartbeat("a"))
    view.hear(heartbeat("a", 2, takes_part=False))
    clock.now += SILENCE + 1
    view.note_losses()
    view.hear(heartbeat("a", 3))
    assert view.take_reunion() is None


def test_one_that_cannot_be_reached_is_lost_at_once(view: MembershipView) -> None:
    view.hear(heartbeat("a", addresses=("/ip4/10.0.0.1/tcp/1",)))
    stand_in(view, 3)
    view.give_up(b"a")
    assert not view.is_here(b"a") and view.addresses_of(b"a") == ("/ip4/10.0.0.1/tcp/1",)
    view.hear(heartbeat("a", 2))
    assert view.take_reunion() == Reunion(3, frozenset({b"a"}))


X, Y = ("a", "b"), ("c", "d")


def test_who_has_lost_nobody_counts_like_everybody_else() -> None:
    assert weights({peer: ((), None) for peer in "abc"}) == dict.fromkeys("abc", 1.0)


def test_a_half_counts_for_the_rounds_that_it_did() -> None:
    found = weights({"a": (X, 30), "b": (X, 30), "c": (Y, 10), "d": (Y, 10)})
    assert found["a"] + found["b"] == pytest.approx(3 * (found["c"] + found["d"]))
    assert found["a"] == 1.0


def test_unequal_halves_count_for_their_rounds_and_not_for_their_size() -> None:
    three = ("a", "b", "c")
    found = weights({**{peer: (three, 12) for peer in three}, "d": (("d",), 12)})
    assert found["a"] + found["b"] + found["c"] == pytest.approx(found["d"])


def test_one_that_did_nothing_meanwhile_counts_for_nothing() -> None:
    found = weights({"a": (X, 30), "b": (X, 30), "c": (("c",), 0)})
    assert found["c"] < 1e-6 < found["a"]


def test_a_newcomer_counts_like_the_average_of_the_others() -> None:
    found = weights({"a": (X, 30), "b": (X, 30), "c": (Y, 10), "d": (Y, 10), "e": ((), None)})
    others = [found[peer] for peer in "abcd"]
    assert found["e"] == pytest.approx(sum(others) / len(others))


@pytest.mark.parametrize("seed", range(10))
def test_weights_do_not_depend_on_the_order_and_are_positive(seed: int) -> None:
    dice = random.Random(seed)
    told = {peer: (dice.choice([X, Y, ()]), dice.choice([None, 0, 3, 17])) for peer in "abcdefgh"}
    shuffled = list(told.items())
    dice.shuffle(shuffled)
    found = weights(told)
    assert found == pytest.approx(weights(dict(shuffled)))
    assert all(0 < weight <= 1 for weight in found.values())


class Returning(StateSync):
    """A peer as far as it notes who is here again."""

    _parent_pid = 0  # it has nothing to shut down

    def __init__(self, groups: list[str], round_: int) -> None:
        self._apart, self._lost, self._half, self._astray = None, frozenset(), [], 0
        self._groups = deque(frozenset(c.encode() for c in group) for group in groups)
        self.told: list[Reunion] = []
        self.round = round_

    @property
    def local_epoch(self) -> int:
        return self.round

    @property
    def tracker(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(take_reunion=lambda: self.told.pop() if self.told else None)

    def hear(self, since: int, peers: str) -> None:
        self.told = [Reunion(since, frozenset(c.encode() for c in peers))]
        self._note_reunion()


def test_who_is_lost_again_for_a_moment_makes_nothing_less_of_what_was_done() -> None:
    """Else a half whose links flap as they come back would count for nothing."""
    peer = Returning(["abcd", "ab"], round_=30)
    peer.hear(20, "c")
    assert (peer._apart, peer._half, peer._lost) == (10, [b"a", b"b"], {b"c"})
    peer._groups.append(frozenset({b"a", b"b", b"c"}))
    peer.hear(30, "c")
    assert (peer._apart, peer._half, peer._lost) == (10, [b"a", b"b"], {b"c"})
    peer.round = 32
    peer.hear(20, "d")  # later than the other, and two more rounds without it
    assert (peer._apart, peer._half, peer._lost) == (12, [b"a", b"b"], {b"c", b"d"})
    assert peer._astray == 33, "parameters are averaged once all are here"


def test_rounds_that_were_skipped_are_not_counted_as_done(view: MembershipView) -> None:
    """A half that stands where the other is did not do the other's rounds."""
    for name in ("a", "b"):
        view.hear(heartbeat(name))
    stand_in(view, 5)
    view.give_up(b"a")
    view.give_up(b"b")
    stand_in(view, 9)
    view.hear(heartbeat("a", 2))
    stand_in(view, 50)
    view.skip(41)
    assert view.take_reunion() == Reunion(46, frozenset({b"a"}))
    view.hear(heartbeat("b", 2))
    assert view.take_reunion() == Reunion(46, frozenset({b"b"})), "four rounds, as before"


def test_a_peer_that_skips_to_the_others_did_not_do_their_rounds() -> None:
    dht = SimpleNamespace(client_mode=False, peer_id=PEER)
    tracker = LiveProgressTracker(dht, "run", target_batch_size=8, start=False)
    gone = OTHER.to_bytes()
    tracker._view.hear(Heartbeat(gone, 1.0, version=1, takes_part=True))
    tracker.update_epoch(5)
    tracker._view.give_up(gone)
    tracker.update_epoch(9)
    tracker.skip_to(50)
    assert tracker.local_progress.epoch == 50
    tracker._view.hear(Heartbeat(gone, 1.0, version=2, takes_part=True))
    assert tracker.take_reunion() == Reunion(46, frozenset({gone})), "four rounds were done"
