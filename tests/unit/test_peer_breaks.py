"""When a peer steps out of the rounds, and what it has to catch up with when it is back."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.membership.breaks import BREAK_S, Breaks
from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.membership.view import Heartbeat
from rayhive.optim.stepping_out import SteppingOut
from tests.unit.clock_fakes import Clock, clock

__all__ = ["clock"]


@pytest.fixture
def tracker(clock: Clock) -> LiveProgressTracker:
    """One that talks to nobody, and takes part."""
    peer_id: Any = SimpleNamespace(to_bytes=lambda: b"own")
    dht: Any = SimpleNamespace(peer_id=peer_id, client_mode=False)
    tracker = LiveProgressTracker(dht, "run", 64, start=False)
    tracker._breaks = Breaks(clock)
    tracker.take_part(True)
    return tracker


def heard(tracker: LiveProgressTracker, name: str, **fields: Any) -> None:
    heartbeat = Heartbeat(name.encode(), 0.0, version=len(fields), takes_part=True)
    tracker._view.hear(dataclasses.replace(heartbeat, **fields))


def test_a_short_break_is_none_and_a_long_one_ends_with_the_next_batch(
    tracker: LiveProgressTracker, clock: Clock
) -> None:
    tracker.end_batch()
    clock.now += BREAK_S
    tracker._step_out_if_idle()
    assert tracker.takes_part
    assert tracker.begin_batch() is None
    tracker.end_batch()
    clock.now += 3.0
    tracker.end_batch()  # of a validation: the break goes on
    tracker._step_out_if_idle()
    assert not tracker.takes_part
    assert tracker.begin_batch() == 3.0
    tracker.take_part(True)
    assert tracker.begin_batch() is None


def test_who_computes_never_steps_out(tracker: LiveProgressTracker, clock: Clock) -> None:
    clock.now += 100.0
    tracker._step_out_if_idle()
    tracker.end_batch()
    tracker.begin_batch()
    clock.now += 100.0
    tracker._step_out_if_idle()
    assert tracker.takes_part


def test_who_does_not_take_part_does_not_come_back_by_itself(
    tracker: LiveProgressTracker, clock: Clock
) -> None:
    """It loads a state, or leaves."""
    tracker.take_part(False)
    tracker.end_batch()
    clock.now += 100.0
    tracker._step_out_if_idle()
    assert tracker.begin_batch() is None


@pytest.mark.parametrize("kind", ["averaged", "synchronised"])
def test_who_averages_in_the_background_stays(
    tracker: LiveProgressTracker, clock: Clock, kind: str
) -> None:
    """The others have it in their group."""
    tracker.enter(1)
    other = "averaged" if kind == "synchronised" else "synchronised"
    tracker.has_ended(other, 1, met=True)
    tracker.end_batch()
    clock.now += 100.0
    tracker._step_out_if_idle()
    assert tracker.takes_part
    tracker.has_ended(kind, 1, met=True)
    tracker._step_out_if_idle()
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
def test_a_round_is_missed_when_others_have_averaged_it(
    tracker: LiveProgressTracker, other: dict[str, Any], missed: bool
) -> None:
    tracker._say(round=3, averaged=3)
    heard(tracker, "a", **other)
    assert tracker.has_missed(4, timeout=5.0) is missed


class Returning(SimpleNamespace):
    """A peer that stepped out after round 3."""

    local_epoch, averaging_timeout = 3, 1.0

    def __init__(self, missed: bool) -> None:
        super().__init__(did=[])
        self.tracker = SimpleNamespace(
            begin_batch=lambda: 2.0,
            has_missed=lambda round_, timeout: missed,
            take_part=lambda takes_part: self.did.append(("takes part", takes_part)),
        )

    def load_state_from_peers(self, keep_gradients: bool) -> None:
        self.did.append(("loads, keeps gradients", keep_gradients))

    def _emit(self, kind: str, **fields: Any) -> None:
        self.did.append((kind, fields["seconds"]))


@pytest.mark.parametrize(
    ("missed", "first"), [(True, ("loads, keeps gradients", True)), (False, ("takes part", True))]
)
def test_a_peer_that_is_back_loads_the_state_if_it_missed_a_round(missed: bool, first: Any) -> None:
    peer: Any = Returning(missed)
    SteppingOut.begin_batch(peer)
    assert peer.did == [first, ("stepped_in", 2.0)]


@pytest.mark.parametrize(
    ("met", "apart", "loads"), [(True, None, True), (False, None, False), (True, 2, False)]
)
def test_a_round_that_began_just_when_a_peer_was_back_is_not_done_alone(
    met: bool, apart: int | None, loads: bool
) -> None:
    peer: Any = Returning(missed=True)
    peer.tracker.was_met = lambda round_: met and round_ == 4
    peer._note_reunion, peer._apart = lambda: None, apart
    assert SteppingOut._take_over_missed_round(peer) is loads
    assert peer.did == ([("loads, keeps gradients", True)] if loads else [])


@pytest.mark.parametrize(("met", "over"), [(3, False), (4, True)])
def test_a_round_is_over_when_others_have_met_in_it(
    tracker: LiveProgressTracker, met: int, over: bool
) -> None:
    heard(tracker, "a", round=4, averaged=4, met_averaged=met)
    assert tracker.was_met(4) is over
