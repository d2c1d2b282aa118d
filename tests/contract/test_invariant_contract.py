"""The contract of invariants, over the registry: clean logs pass, planted violations are found.

A new invariant needs an entry in ``PLANTED``: changes to a clean log that it has to find.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from rayhive.events import InvariantChecked
from rayhive.invariants import check_all
from rayhive.invariants.base import Invariant
from rayhive.registry import INVARIANTS
from rayhive.timeline import Timeline
from tests.fixtures.faulted import ALL, REST, Story, kill_and_restart, planned
from tests.fixtures.logs import make_spec, records

INVARIANT_KINDS = [pytest.param(kind, id=name) for name, kind in INVARIANTS.items()]


def long_story() -> Story:
    """Peer 1 is killed and comes back, and all train on for long enough to settle."""
    story = kill_and_restart()
    story.events = [e for e in story.events if e["t"] < story.events[-1]["t"] - 1.05]
    again = ("peer-0", "peer-1.1", "peer-2")
    for name in again:  # the story's own end is taken back
        story.computed[name] -= 6
    story.rounds(*(13.9 + n for n in range(18)), peers=again)
    story.finish(31.0, again, pending=6)
    story.end(32.0)
    return story


def paused_story() -> Story:
    """Peer 1 stands still from 4.5 s to 9.5 s, loads a state one round old and goes on."""
    story = Story([planned(kind="pause", heal_after_s=5.0)])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, ["peer-1"])
    story.rounds(5.5, 6.5, 7.5, 8.5, peers=REST)
    story.heal(9.5, 0, ["peer-1"])
    story.computed["peer-1"] += 32
    story.say(
        9.9, "state_loaded", "peer-1", round_before=4, round_of_state=7, round=8, seconds=0.1,
        lost=32, received_bytes=1,
    )  # fmt: skip
    story.say(9.91, "weights", "peer-1", round=8, norm=10.0, sketch=[10.0, 0.3], finite=True)
    story.rounds(10.5, 11.5, 12.5, 13.5, peers=ALL)
    story.finish(14.0, ALL)
    story.end(15.0)
    return story


def paused_early_story() -> Story:
    """The same, but the others averaged the parameters of round 4 without it."""
    story = paused_story()
    (event,) = [e for e in story.of("state_round", "peer-1") if e["round"] == 4]
    story.events.remove(event)
    for event in story.of("weights", "peer-1"):
        if event["round"] == 4:
            event["sketch"] = [10.0, 5e-4]
    return story


def joined_story() -> Story:
    """A plan brings a fourth peer, which trains from 4 s on."""
    story = Story([planned(kind="join", who=("peer-3",))])
    story.rounds(1.0, 2.0, 3.0, peers=ALL)
    story.join(2.5, 3.9, "peer-3", cause="f0")
    story.fire(2.6, 0, ["peer-3"])
    story.rounds(*(4.0 + n for n in range(25)), peers=(*ALL, "peer-3"))
    story.finish(29.0, (*ALL, "peer-3"))
    story.end(30.0)
    return story


def halves_story() -> Story:
    """Four peers are cut in halves for 4 s; then one half loads the other's state."""
    all_four, half, other = (*ALL, "peer-3"), ("peer-0", "peer-1"), ("peer-2", "peer-3")
    story = Story([planned(kind="partition", who=other, heal_after_s=4.0)], peers=4)
    story.rounds(1.0, 2.0, peers=all_four)
    story.fire(2.5, 0, list(other))
    story.rounds(4.0, 5.0, 6.0, 7.0, peers=half)
    ahead, story.round = story.round, 2
    story.rounds(4.5, 6.5, peers=other)
    for event in story.of("weights"):
        if event["round"] > 2:
            event["sketch"] = [10.0, 0.5 if event["peer"] in half else 0.7]
    story.heal(6.6, 0, list(other))
    story.round = ahead
    for name in other:
        story.say(
            7.5, "state_loaded", name, round_before=4, round_of_state=6, round=6, seconds=0.5,
            lost=0, received_bytes=1,
        )  # fmt: skip
    story.rounds(*(8.5 + n for n in range(16)), peers=all_four)
    story.finish(24.0, all_four)
    story.end(25.0)
    return story


CLEAN: dict[str, Callable[[], Story]] = {
    "nothing broke": lambda: told(Story()),
    "killed and started again": kill_and_restart,
    "the same, and long afterwards": long_story,
    "paused": paused_story,
    "paused before its parameters were averaged": paused_early_story,
    "joined": joined_story,
    "cut in halves": halves_story,
}


def told(story: Story) -> Story:
    story.rounds(*(float(n) for n in range(1, 16)), peers=ALL)
    story.finish(15.0, ALL)
    story.end(16.0)
    return story


# -- planted violations ------------------------------------------------------------------------


def last(story: Story, kind: str, peer: str | None = None) -> dict[str, Any]:
    return story.of(kind, peer)[-1]


def drop(story: Story, kind: str, peer: str | None = None) -> None:
    gone = story.of(kind, peer)
    story.events = [event for event in story.events if not any(event is one for one in gone)]


def apart(story: Story, first: int = 1) -> None:
    """Peer 2's weights are not the others'."""
    for event in story.of("weights", "peer-2"):
        if event["round"] >= first:
            event["sketch"] = [10.0, 0.01]


def never_made_equal(story: Story) -> None:
    """Peer 2 failed to average in every round, and nothing ever made it equal again."""
    for event in (*story.of("round", "peer-2"), *story.of("state_round", "peer-2")):
        event |= {"outcome": "local" if event["kind"] == "round" else "failed"}
    apart(story)


def apart_by_a_bit(story: Story) -> None:
    """Peers round alike, and peer 2's weights differ in the last bit."""
    for event in story.of("peer_ready"):
        event["arithmetic"] = "torch, processor"
    for event in story.of("weights", "peer-2"):
        event["sketch"] = [math.nextafter(value, math.inf) for value in event["sketch"]]


def split(story: Story) -> None:
    """Two components from the beginning: peer 2 trains alone and sees no other peer."""
    for event in story.of("round"):
        alone = event["peer"] == "peer-2"
        event |= {"live_peers": 1 if alone else 2, "group_size": None if alone else 2}
        event["outcome"] = "alone" if alone else "averaged"


def groups_apart(story: Story) -> None:
    """All see all, and still they average in two groups."""
    for event in story.of("round"):
        event["group_size"] = 2


def backwards(story: Story) -> None:
    last(story, "transition", "peer-0")["round"] -= 1


def twice(story: Story) -> None:
    """Peer 0 averages the same round a second time."""
    one, other = story.of("round", "peer-0")[-2:]
    other["round"] = one["round"]


def state_of_the_past(story: Story) -> None:
    """A peer takes over a state and stands at a round before its own."""
    last(story, "state_loaded").update(round_before=9, round_of_state=9)


def joiner_from_the_start(story: Story) -> None:
    """The replacement begins where the first life began."""
    for kind in ("round", "transition", "weights", "state_round"):
        for event in story.of(kind, "peer-1.1"):
            event["round"] -= 9
    last(story, "state_loaded", "peer-1.1").update(round=0, round_of_state=0)


def a_batch_vanishes(story: Story) -> None:
    for event in story.of("transition", "peer-0")[5:]:
        event["computed"] += 32
    last(story, "peer_finished", "peer-0")["samples"] += 32


def a_batch_counts_twice(story: Story) -> None:
    last(story, "round", "peer-0")["samples"] += 32


def an_impossible_loss(story: Story) -> None:
    """A round that was applied took samples of its peer and lost others: they vanished."""
    event = last(story, "round", "peer-0")
    event["samples"], event["lost"] = event["samples"] - 32, 32


def more_in_rounds_than_computed(story: Story) -> None:
    """As in logs of peers that do not report pending samples."""
    for event in story.of("transition"):
        del event["computed"]
    finished = last(story, "peer_finished", "peer-0")
    del finished["pending"]
    finished["samples"] = 64


def a_long_wait(story: Story) -> None:
    """Peer 0 makes no round for longer than an averaging may take, while nothing is broken."""
    wait(story, story.events[0]["t"] + 16.95)


def a_longer_wait_than_the_fault(story: Story) -> None:
    """A paused peer is healed and does not go on."""
    wait(story, last(story, "fault_healed")["t"])


def wait(story: Story, since: float) -> None:
    """Make the training stand still for a minute, in which nobody evaluates."""
    for event in [event for event in story.events if event["t"] > since]:
        for name in {"t", "clock_s"} & event.keys():
            event[name] += 60.0


def never_contributes(story: Story, name: str = "peer-1.1") -> None:
    for event in story.of("round", name):
        event |= {"outcome": "alone", "group_size": None}


def no_samples_of_its_own(story: Story) -> None:
    for event in story.of("round", "peer-1.1"):
        event["samples"] = 0


def disordered(story: Story) -> None:
    events = story.of("round", "peer-0")
    events[3]["t"], events[6]["t"] = events[6]["t"], events[3]["t"]


Plant = Callable[[Story], object]
#: Invariant -> planted violations: the name of a clean log and the change to it.
PLANTED: dict[str, list[tuple[str, Plant]]] = {
    "log_complete": [
        ("nothing broke", lambda s: drop(s, "replicate_started")),
        ("nothing broke", lambda s: s.say(17.0, "notice", "peer-0")),
        ("nothing broke", lambda s: drop(s, "peer_ready", "peer-1")),
        ("nothing broke", lambda s: drop(s, "training_started", "peer-1")),
        ("nothing broke", lambda s: drop(s, "peer_finished", "peer-1")),
        ("nothing broke", disordered),
        ("killed and started again", lambda s: drop(s, "fault_verified")),
        ("killed and started again", lambda s: drop(s, "fault_fired")),
        ("killed and started again", lambda s: s.fire(7.0, 0, ["peer-1.1"])),
        ("killed and started again", lambda s: last(s, "fault_fired").update(fault="f7")),
        ("killed and started again", lambda s: s.say(12.0, "notice", "peer-1")),
        ("killed and started again", lambda s: drop(s, "peer_lost", "peer-1")),
    ],
    "one_component": [
        ("nothing broke", split),
        ("nothing broke", groups_apart),
        ("cut in halves", groups_apart),
    ],
    "parameters_finite": [
        ("nothing broke", lambda s: last(s, "weights").update(finite=False)),
        ("killed and started again", lambda s: s.evaluate(13.6, ["peer-0"], math.nan)),
    ],
    "replacement_contributes": [
        ("the same, and long afterwards", never_contributes),
        ("the same, and long afterwards", no_samples_of_its_own),
        ("joined", lambda s: never_contributes(s, "peer-3")),
    ],
    "replicas_agree": [
        ("nothing broke", apart),
        ("nothing broke", lambda s: apart(s, first=15)),
        ("killed and started again", apart),
        ("nothing broke", never_made_equal),
        ("nothing broke", apart_by_a_bit),
        ("cut in halves", lambda s: apart(s, first=8)),
    ],
    "rounds_monotone": [
        ("nothing broke", backwards),
        ("nothing broke", twice),
        ("killed and started again", state_of_the_past),
        ("killed and started again", joiner_from_the_start),
    ],
    "samples_conserved": [
        ("nothing broke", a_batch_vanishes),
        ("nothing broke", a_batch_counts_twice),
        ("nothing broke", an_impossible_loss),
        ("nothing broke", more_in_rounds_than_computed),
        ("paused", lambda s: last(s, "state_loaded").update(lost=0)),
        ("killed and started again", lambda s: last(s, "peer_finished").update(pending=0)),
    ],
    "survivors_progress": [
        ("nothing broke", a_long_wait),
        ("paused", a_longer_wait_than_the_fault),
    ],
}


def result_of(story: Story, name: str) -> InvariantChecked:
    return next(r for r in check_all(story.spec, story.timeline.events) if r.name == name)


def check_planted(name: str) -> None:
    """The invariant checks something in a clean log, and finds every planted violation."""
    assert name in PLANTED, f"no violation is planted for {name}"
    checked = any(result_of(make(), name).checked for make in CLEAN.values())
    assert checked, f"{name} checks nothing in any clean log"
    for clean, plant in PLANTED[name]:
        story = CLEAN[clean]()
        plant(story)
        result = result_of(story, name)
        assert not result.ok, f"{name} finds no violation in a log with one ({clean})"
        assert all(isinstance(text, str) and text for text in result.violations)


@pytest.mark.parametrize("kind", INVARIANT_KINDS)
def test_it_has_a_summary_and_a_docstring(kind: type[Invariant]) -> None:
    assert kind.about.endswith(".") and kind.__doc__


@pytest.mark.parametrize("name", INVARIANTS.names())
@pytest.mark.parametrize("clean", CLEAN)
def test_a_clean_log_passes(clean: str, name: str) -> None:
    result = result_of(CLEAN[clean](), name)
    assert result.ok, result.violations


@pytest.mark.parametrize("name", INVARIANTS.names())
def test_it_finds_the_planted_violations(name: str) -> None:
    check_planted(name)


def test_nothing_is_planted_for_an_unknown_invariant() -> None:
    assert PLANTED.keys() <= set(INVARIANTS.names())


class CannotFail(Invariant):
    """An invariant that checks something and never finds a violation."""

    about = "Always holds."

    def check(self, log: Timeline) -> list[str]:
        self.checked += len(log.events)
        return []


class ChecksNothing(CannotFail):
    """An invariant that checks nothing."""

    def check(self, log: Timeline) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("new", CannotFail, "no violation is planted for new"),
        ("rounds_monotone", CannotFail, "finds no violation"),
        ("rounds_monotone", ChecksNothing, "checks nothing"),
    ],
)
def test_an_invariant_that_cannot_fail_is_found(
    name: str, kind: type[Invariant], text: str
) -> None:
    with INVARIANTS.replaced(name, kind), pytest.raises(AssertionError, match=text):
        check_planted(name)


@pytest.mark.parametrize("kind", INVARIANT_KINDS)
def test_a_log_that_ends_early_is_no_error(kind: type[Invariant]) -> None:
    story = long_story()
    events = story.timeline.events
    for count in range(0, len(events), 11):
        kind().check(Timeline(story.spec, events[:count]))
    empty = Timeline(make_spec(), [])
    assert kind().check(empty) in ([], ["does not begin with its one replicate_started"])


@pytest.mark.parametrize("clean", CLEAN)
def test_logs_with_missing_events_are_checked_without_an_error(clean: str) -> None:
    story = CLEAN[clean]()
    for seed in range(20):
        chance = Random(seed)
        events = [event for event in story.events if chance.random() < 0.7]
        results = check_all(story.spec, records(events))
        assert [result.name for result in results] == list(INVARIANTS.names())
        assert all(result.ok is not bool(result.violations) for result in results)
