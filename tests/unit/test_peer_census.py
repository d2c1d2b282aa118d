"""What a peer makes of what it hears: who is alive, who takes part, how far everybody is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rayhive.membership.view import Census, Presence
from tests.unit.clock_fakes import Clock, clock

SILENCE = 4.0


__all__ = ["clock"]


def presence(name: str, since: float = 0.0, **fields: Any) -> Presence:
    return Presence(name.encode(), since, **{"version": 1, "takes_part": True, **fields})


@pytest.fixture
def census(clock: Clock) -> Census:
    return Census(presence("own", since=5.0), SILENCE, clock)


def names(presences: list[Presence]) -> list[str]:
    return [each.peer_id.decode() for each in presences]


def test_what_is_packed_is_read_back() -> None:
    said = presence("a", round=3, samples=7, samples_per_second=1.5, client_mode=True)
    assert Presence.unpack(said.pack()) == said


def test_the_oldest_comes_first_and_equal_ages_have_an_order(census: Census) -> None:
    for name, since in (("late", 9.0), ("b", 1.0), ("a", 1.0)):
        census.hear(presence(name, since))
    assert names(census.taking_part()) == ["a", "b", "own", "late"]


def test_newer_words_replace_older_ones_and_not_the_other_way(census: Census) -> None:
    assert census.hear(presence("a", version=2, round=5))
    assert not census.hear(presence("a", version=1, round=4))
    assert not census.hear(presence("a", version=2, round=9))
    assert census.newest_round() == 5


def test_a_silent_peer_is_dead_until_it_is_heard_of_again(census: Census, clock: Clock) -> None:
    census.hear(presence("a"))
    clock.now += SILENCE
    assert names(census.present()) == ["a", "own"]
    clock.now += 0.1
    assert names(census.present()) == ["own"]
    census.hear(presence("a"))  # nothing new, but a sign of life
    assert names(census.present()) == ["a", "own"]


def test_a_peer_that_cannot_be_reached_is_dead_until_it_calls(census: Census) -> None:
    census.hear(presence("a"))
    census.give_up(b"a")
    assert names(census.present()) == ["own"]
    census.hear(presence("a", version=7), age=0.5)  # somebody else says so
    assert names(census.present()) == ["own"]
    census.hear(presence("a"))
    assert names(census.present()) == ["a", "own"]


def test_others_word_does_not_keep_a_dead_peer_alive(census: Census, clock: Clock) -> None:
    census.hear(presence("a"))
    census.hear(presence("client", client_mode=True))
    for _ in range(3):
        clock.now += SILENCE / 2
        census.hear(presence("a"), age=0.1)
        census.hear(presence("client", client_mode=True), age=0.1)
    # a client cannot be called, so what others heard of it has to do
    assert names(census.present()) == ["client", "own"]


def test_hearsay_is_as_old_as_it_is(census: Census, clock: Clock) -> None:
    census.hear(presence("a"), age=3.0)
    clock.now += SILENCE - 3.0
    assert "a" in names(census.present())
    clock.now += 0.1
    assert "a" not in names(census.present())


def test_what_is_told_makes_another_census_equal(census: Census, clock: Clock) -> None:
    census.hear(presence("a", round=4))
    clock.now += 1.0
    other = Census(presence("other"), SILENCE, clock)
    for fields, age, idle in census.told():
        other.hear(Presence.unpack(fields), age, idle)
    assert names(other.present()) == ["a", "other", "own"]
    clock.now += SILENCE - 0.5
    assert names(other.present()) == ["other", "own"], "a was heard of a second earlier"


def test_lost_is_who_is_silent_without_a_goodbye(census: Census, clock: Clock) -> None:
    for peer in (presence("a"), presence("left", takes_part=False), presence("here")):
        census.hear(peer)
    assert census.lost() == frozenset()
    clock.now += SILENCE + 0.1
    census.hear(presence("here", version=2))
    assert census.lost() == {presence("a").peer_id}
    census.hear(presence("a", version=2))
    assert census.lost() == frozenset()


def test_the_dead_are_forgotten_after_a_while(census: Census, clock: Clock) -> None:
    census.hear(presence("a"))
    clock.now += 61.0
    census.forget(60.0)
    assert census.others() == []


def test_samples_count_in_the_newest_round_of_those_who_take_part(census: Census) -> None:
    census.own = presence("own", round=3, samples=10)
    census.hear(presence("a", round=3, samples=20))
    census.hear(presence("behind", round=2, samples=40))
    census.hear(presence("loading", round=3, samples=80, takes_part=False))
    assert census.samples() == 30
    census.hear(presence("ahead", round=4, samples=5))
    assert (census.newest_round(), census.samples()) == (4, 5)


def test_a_client_does_not_say_which_round_it_is(census: Census) -> None:
    census.hear(presence("client", round=9, client_mode=True))
    assert census.newest_round() == 0


def test_who_is_far_behind_is_not_in_step(census: Census) -> None:
    census.own = presence("own", round=9)
    for name, round_ in (("a", 9), ("b", 8), ("c", 7), ("d", 6)):
        census.hear(presence(name, round=round_))
    census.hear(presence("leaving", round=9, takes_part=False))
    assert census.in_step() == 4


def test_members_say_what_the_kind_of_averaging_needs(census: Census) -> None:
    said = presence("a", round=5, averaged=5, synchronised=4, met_averaged=3, met_synchronised=2)
    census.hear(said)
    assert census.members("averaged")[0][2:] == (5, 5, 3, 0)
    assert census.members("synchronised", computes=False)[0][2:] == (5, 4, 2, None)
    census.hear(dataclasses.replace(said, version=2, takes_part=False))
    assert [member.peer_id for member in census.members("averaged")] == [b"own"]


STRAGGLER = 20.0


@pytest.fixture
def patient(clock: Clock) -> Census:
    return Census(presence("own", since=5.0), 1e6, clock, STRAGGLER)


def test_a_peer_that_computes_is_waited_for_until_it_makes_no_progress(
    patient: Census, clock: Clock
) -> None:
    patient.hear(presence("a", version=2, round=7, samples=5))
    clock.now += STRAGGLER
    patient.hear(presence("a", version=2, round=7, samples=5), idle=STRAGGLER)  # a sign of life
    assert names(patient.taking_part()) == ["a", "own"]
    clock.now += 0.1
    assert names(patient.taking_part()) == ["own"]
    assert patient.in_step() == 1 and patient.samples() == 0
    assert patient.newest_round() == 7, "what it has done counts"
    assert patient.lost() == frozenset(), "it lives"
    patient.hear(presence("a", version=3, round=7, samples=9))
    assert names(patient.taking_part()) == ["a", "own"]


def test_a_peer_that_waits_for_others_in_a_round_makes_progress_enough(
    patient: Census, clock: Clock
) -> None:
    patient.hear(presence("a", round=3, entered=4))
    clock.now += 2 * STRAGGLER
    assert names(patient.taking_part()) == ["a", "own"]


def test_a_newcomer_hears_how_long_a_peer_has_made_no_progress(
    patient: Census, clock: Clock
) -> None:
    patient.hear(presence("a"))
    clock.now += STRAGGLER - 1.0
    newcomer = Census(presence("new"), 1e6, clock, STRAGGLER)
    for fields, age, idle in patient.told():
        newcomer.hear(Presence.unpack(fields), age, idle)
    assert "a" in names(newcomer.taking_part())
    clock.now += 1.1
    assert "a" not in names(newcomer.taking_part())


def test_a_peer_that_is_away_is_not_waited_for_and_is_where_it_is(census: Census) -> None:
    census.hear(presence("a", round=9, averaged=9, samples=3, takes_part=False, away=True))
    census.hear(presence("left", round=11, averaged=11, takes_part=False))
    assert names(census.taking_part()) == ["own"]
    assert (census.newest_round(), census.newest_averaged("averaged")) == (9, 9)
    assert census.lost() == frozenset()
