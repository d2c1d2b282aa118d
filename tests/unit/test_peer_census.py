"""What a peer makes of what it hears: who is alive, who takes part, how far everybody is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rayhive.membership.view import Heartbeat, MembershipView
from tests.unit.clock_fakes import Clock, clock

SILENCE = 4.0


__all__ = ["clock"]


def heartbeat(name: str, since: float = 0.0, **fields: Any) -> Heartbeat:
    return Heartbeat(name.encode(), since, **{"version": 1, "takes_part": True, **fields})


@pytest.fixture
def view(clock: Clock) -> MembershipView:
    return MembershipView(heartbeat("own", since=5.0), SILENCE, clock)


def names(heartbeats: list[Heartbeat]) -> list[str]:
    return [each.peer_id.decode() for each in heartbeats]


def test_what_is_packed_is_read_back() -> None:
    said = heartbeat("a", round=3, samples=7, samples_per_second=1.5, client_mode=True)
    assert Heartbeat.unpack(said.pack()) == said


def test_the_oldest_comes_first_and_equal_ages_have_an_order(view: MembershipView) -> None:
    for name, since in (("late", 9.0), ("b", 1.0), ("a", 1.0)):
        view.hear(heartbeat(name, since))
    assert names(view.taking_part()) == ["a", "b", "own", "late"]


def test_newer_words_replace_older_ones_and_not_the_other_way(view: MembershipView) -> None:
    assert view.hear(heartbeat("a", version=2, round=5))
    assert not view.hear(heartbeat("a", version=1, round=4))
    assert not view.hear(heartbeat("a", version=2, round=9))
    assert view.newest_round() == 5


def test_a_silent_peer_is_dead_until_it_is_heard_of_again(
    view: MembershipView, clock: Clock
) -> None:
    view.hear(heartbeat("a"))
    clock.now += SILENCE
    assert names(view.present()) == ["a", "own"]
    clock.now += 0.1
    assert names(view.present()) == ["own"]
    view.hear(heartbeat("a"))  # nothing new, but a sign of life
    assert names(view.present()) == ["a", "own"]


def test_a_peer_that_cannot_be_reached_is_dead_until_it_calls(view: MembershipView) -> None:
    view.hear(heartbeat("a"))
    view.give_up(b"a")
    assert names(view.present()) == ["own"]
    view.hear(heartbeat("a", version=7), age=0.5)  # somebody else says so
    assert names(view.present()) == ["own"]
    view.hear(heartbeat("a"))
    assert names(view.present()) == ["a", "own"]


def test_others_word_does_not_keep_a_dead_peer_alive(view: MembershipView, clock: Clock) -> None:
    view.hear(heartbeat("a"))
    view.hear(heartbeat("client", client_mode=True))
    for _ in range(3):
        clock.now += SILENCE / 2
        view.hear(heartbeat("a"), age=0.1)
        view.hear(heartbeat("client", client_mode=True), age=0.1)
    # a client cannot be called, so what others heard of it has to do
    assert names(view.present()) == ["client", "own"]


def test_hearsay_is_as_old_as_it_is(view: MembershipView, clock: Clock) -> None:
    view.hear(heartbeat("a"), age=3.0)
    clock.now += SILENCE - 3.0
    assert "a" in names(view.present())
    clock.now += 0.1
    assert "a" not in names(view.present())


def test_what_is_told_makes_another_census_equal(view: MembershipView, clock: Clock) -> None:
    view.hear(heartbeat("a", round=4))
    clock.now += 1.0
    other = MembershipView(heartbeat("other"), SILENCE, clock)
    for fields, age, idle in view.told():
        other.hear(Heartbeat.unpack(fields), age, idle)
    assert names(other.present()) == ["a", "other", "own"]
    clock.now += SILENCE - 0.5
    assert names(other.present()) == ["other", "own"], "a was heard of a second earlier"


def test_lost_is_who_is_silent_without_a_goodbye(view: MembershipView, clock: Clock) -> None:
    for peer in (heartbeat("a"), heartbeat("left", takes_part=False), heartbeat("here")):
        view.hear(peer)
    assert view.lost() == frozenset()
    clock.now += SILENCE + 0.1
    view.hear(heartbeat("here", version=2))
    assert view.lost() == {heartbeat("a").peer_id}
    view.hear(heartbeat("a", version=2))
    assert view.lost() == frozenset()


def test_the_dead_are_forgotten_after_a_while(view: MembershipView, clock: Clock) -> None:
    view.hear(heartbeat("a"))
    clock.now += 61.0
    view.forget(60.0)
    assert view.others() == []


def test_samples_count_in_the_newest_round_of_those_who_take_part(view: MembershipView) -> None:
    view.own = heartbeat("own", round=3, samples=10)
    view.hear(heartbeat("a", round=3, samples=20))
    view.hear(heartbeat("behind", round=2, samples=40))
    view.hear(heartbeat("loading", round=3, samples=80, takes_part=False))
    assert view.samples() == 30
    view.hear(heartbeat("ahead", round=4, samples=5))
    assert (view.newest_round(), view.samples()) == (4, 5)


def test_a_client_does_not_say_which_round_it_is(view: MembershipView) -> None:
    view.hear(heartbeat("client", round=9, client_mode=True))
    assert view.newest_round() == 0


def test_who_is_far_behind_is_not_in_step(view: MembershipView) -> None:
    view.own = heartbeat("own", round=9)
    for name, round_ in (("a", 9), ("b", 8), ("c", 7), ("d", 6)):
        view.hear(heartbeat(name, round=round_))
    view.hear(heartbeat("leaving", round=9, takes_part=False))
    assert view.in_step() == 4


def test_members_say_what_the_kind_of_averaging_needs(view: MembershipView) -> None:
    said = heartbeat("a", round=5, averaged=5, synchronised=4, met_averaged=3, met_synchronised=2)
    view.hear(said)
    assert view.members("averaged")[0][2:] == (5, 5, 3, 0)
    assert view.members("synchronised", computes=False)[0][2:] == (5, 4, 2, None)
    view.hear(dataclasses.replace(said, version=2, takes_part=False))
    assert [member.peer_id for member in view.members("averaged")] == [b"own"]


STRAGGLER = 20.0


@pytest.fixture
def patient(clock: Clock) -> MembershipView:
    return MembershipView(heartbeat("own", since=5.0), 1e6, clock, STRAGGLER)


def test_a_peer_that_computes_is_waited_for_until_it_makes_no_progress(
    patient: MembershipView, clock: Clock
) -> None:
    patient.hear(heartbeat("a", version=2, round=7, samples=5))
    clock.now += STRAGGLER
    patient.hear(heartbeat("a", version=2, round=7, samples=5), idle=STRAGGLER)  # a sign of life
    assert names(patient.taking_part()) == ["a", "own"]
    clock.now += 0.1
    assert names(patient.taking_part()) == ["own"]
    assert patient.in_step() == 1 and patient.samples() == 0
    assert patient.newest_round() == 7, "what it has done counts"
    assert patient.lost() == frozenset(), "it lives"
    patient.hear(heartbeat("a", version=3, round=7, samples=9))
    assert names(patient.taking_part()) == ["a", "own"]


def test_a_peer_that_waits_for_others_in_a_round_makes_progress_enough(
    patient: MembershipView, clock: Clock
) -> None:
    patient.hear(heartbeat("a", round=3, entered=4))
    clock.now += 2 * STRAGGLER
    assert names(patient.taking_part()) == ["a", "own"]


def test_a_newcomer_hears_how_long_a_peer_has_made_no_progress(
    patient: MembershipView, clock: Clock
) -> None:
    patient.hear(heartbeat("a"))
    clock.now += STRAGGLER - 1.0
    newcomer = MembershipView(heartbeat("new"), 1e6, clock, STRAGGLER)
    for fields, age, idle in patient.told():
        newcomer.hear(Heartbeat.unpack(fields), age, idle)
    assert "a" in names(newcomer.taking_part())
    clock.now += 1.1
    assert "a" not in names(newcomer.taking_part())


def test_a_peer_that_is_away_is_not_waited_for_and_is_where_it_is(view: MembershipView) -> None:
    view.hear(heartbeat("a", round=9, averaged=9, samples=3, takes_part=False, away=True))
    view.hear(heartbeat("left", round=11, averaged=11, takes_part=False))
    assert names(view.taking_part()) == ["own"]
    assert (view.newest_round(), view.newest_averaged("averaged")) == (9, 9)
    assert view.lost() == frozenset()
