"""Membership view: live peers, participants and their progress."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from rayhive.membership.known_peer import LEFT_S
from rayhive.membership.view import Heartbeat, MembershipView
from tests.unit.clock_fakes import Clock

SILENCE = 4.0


def heartbeat(name: str, since: float = 0.0, **fields: Any) -> Heartbeat:
    return Heartbeat(name.encode(), since, **{"version": 1, "takes_part": True, **fields})


@pytest.fixture
def view(clock: Clock) -> MembershipView:
    return MembershipView(heartbeat("own", since=5.0), SILENCE, clock)


def names(heartbeats: list[Heartbeat]) -> list[str]:
    return [each.peer_id.decode() for each in heartbeats]


def pass_on(view: MembershipView, to: MembershipView) -> None:
    """Pass on the records of all live peers of a view."""
    for peer in view.alive_ids():
        record = view.record(peer)
        assert record is not None
        to.receive(*record)


def test_a_packed_announcement_is_read_back() -> None:
    announced = heartbeat("a", round=3, samples=7, samples_per_second=1.5, client_mode=True)
    assert Heartbeat.unpack(announced.pack()) == announced


def test_the_oldest_peer_comes_first_and_equal_ages_have_an_order(view: MembershipView) -> None:
    for name, since in (("late", 9.0), ("b", 1.0), ("a", 1.0)):
        view.receive(heartbeat(name, since))
    assert names(view.participants()) == ["a", "b", "own", "late"]


def test_an_announcement_replaces_older_ones_only(view: MembershipView) -> None:
    assert view.receive(heartbeat("a", version=2, round=5))
    assert not view.receive(heartbeat("a", version=1, round=4))
    assert not view.receive(heartbeat("a", version=2, round=9))
    assert view.newest_round() == 5


def test_a_silent_peer_is_dead_until_it_is_heard_of_again(
    view: MembershipView, clock: Clock
) -> None:
    view.receive(heartbeat("a"))
    clock.now += SILENCE
    assert names(view.alive()) == ["a", "own"]
    clock.now += 0.1
    assert names(view.alive()) == ["own"]
    view.receive(heartbeat("a"))  # nothing new, but a message
    assert names(view.alive()) == ["a", "own"]


def test_a_peer_that_cannot_be_reached_is_dead_until_it_calls(view: MembershipView) -> None:
    view.receive(heartbeat("a"))
    view.give_up(b"a")
    assert names(view.alive()) == ["own"]
    view.receive(heartbeat("a", version=7), age=0.5)  # through another peer
    assert names(view.alive()) == ["own"]
    view.receive(heartbeat("a"))
    assert names(view.alive()) == ["a", "own"]


def test_a_lost_peer_is_back_by_what_others_say_although_it_has_no_news(
    view: MembershipView, clock: Clock
) -> None:
    view.receive(heartbeat("a"))
    view.watch([b"b"])
    view.give_up(b"a")
    assert view.take_reunion() is None
    clock.now += 10.0
    view.receive(heartbeat("a"), age=0.1)  # the same version
    assert names(view.alive()) == ["a", "own"]
    reunion = view.take_reunion()
    assert reunion is not None and reunion.peers == {b"a"}


def test_relayed_announcements_keep_no_peer_alive_but_clients(
    view: MembershipView, clock: Clock
) -> None:
    view.receive(heartbeat("a"))
    view.receive(heartbeat("client", client_mode=True))
    for _ in range(3):
        clock.now += SILENCE / 2
        view.receive(heartbeat("a"), age=0.1)
        view.receive(heartbeat("client", client_mode=True), age=0.1)
    # a client cannot be called, so relayed announcements count
    assert names(view.alive()) == ["client", "own"]


def test_a_relayed_announcement_keeps_its_age(view: MembershipView, clock: Clock) -> None:
    view.receive(heartbeat("a"), age=3.0)
    clock.now += SILENCE - 3.0
    assert "a" in names(view.alive())
    clock.now += 0.1
    assert "a" not in names(view.alive())


def test_records_make_another_view_equal(view: MembershipView, clock: Clock) -> None:
    view.receive(heartbeat("a", round=4))
    clock.now += 1.0
    other = MembershipView(heartbeat("other"), SILENCE, clock)
    pass_on(view, other)
    assert names(other.alive()) == ["a", "other", "own"]
    clock.now += SILENCE - 0.5
    assert names(other.alive()) == ["other", "own"], "the announcement of a is a second older"


def test_a_silent_peer_without_a_goodbye_is_lost(view: MembershipView, clock: Clock) -> None:
    for peer in (heartbeat("a"), heartbeat("left", takes_part=False), heartbeat("here")):
        view.receive(peer)
    assert view.lost() == frozenset()
    clock.now += SILENCE + 0.1
    view.receive(heartbeat("here", version=2))
    assert view.lost() == {heartbeat("a").peer_id}
    view.receive(heartbeat("a", version=2))
    assert view.lost() == frozenset()


def test_dead_peers_are_forgotten_after_a_while(view: MembershipView, clock: Clock) -> None:
    view.receive(heartbeat("a"))
    clock.now += 61.0
    view.forget(60.0)
    assert view.known() == []


def test_dead_peers_that_had_left_are_forgotten_sooner(view: MembershipView, clock: Clock) -> None:
    """They are called until then; one that starts is called longer: it may be cut off."""
    for name, began in (("left", True), ("lost", True), ("starts", False), ("back", True)):
        view.receive(heartbeat(name, takes_part=began))
    for name in ("left", "back"):
        view.receive(heartbeat(name, version=2, takes_part=False))
    view.receive(heartbeat("back", version=3))
    clock.now += LEFT_S
    assert not view.forget(3600.0)
    clock.now += 1.0
    assert view.forget(3600.0) and not view.forget(3600.0)
    assert set(names(view.known())) == {"lost", "starts", "back"}


def test_only_samples_of_participants_in_the_newest_round_count(view: MembershipView) -> None:
    view.own = heartbeat("own", round=3, samples=10)
    view.receive(heartbeat("a", round=3, samples=20))
    view.receive(heartbeat("behind", round=2, samples=40))
    view.receive(heartbeat("loading", round=3, samples=80, takes_part=False))
    assert view.samples() == 30
    view.receive(heartbeat("ahead", round=4, samples=5))
    assert (view.newest_round(), view.samples()) == (4, 5)


def test_a_client_that_is_ahead_is_followed_as_any_peer(view: MembershipView) -> None:
    view.receive(heartbeat("client", round=9, averaged=9, client_mode=True))
    assert (view.newest_round(), view.newest_averaged()) == (9, 9)


def test_a_peer_far_behind_cannot_take_part_in_the_next_round(view: MembershipView) -> None:
    view.own = heartbeat("own", round=9)
    for name, round_ in (("a", 9), ("b", 8), ("c", 7), ("d", 6)):
        view.receive(heartbeat(name, round=round_))
    view.receive(heartbeat("leaving", round=9, takes_part=False))
    assert view.live_peers() == 4


def test_members_depend_on_the_kind_of_averaging(view: MembershipView) -> None:
    announced = heartbeat(
        "a", round=5, averaged=5, synchronised=4, met_averaged=3, met_synchronised=2
    )
    view.receive(announced)
    assert view.members("averaged")[0][2:] == (5, 5, 3, 0, False)
    assert view.members("synchronised", computes=False)[0][2:] == (5, 4, 2, None, False)
    view.receive(dataclasses.replace(announced, version=2, takes_part=False))
    assert [member.peer_id for member in view.members("averaged")] == [b"own"]


STRAGGLER = 20.0


@pytest.fixture
def patient(clock: Clock) -> MembershipView:
    return MembershipView(heartbeat("own", since=5.0), 1e6, clock, STRAGGLER)


def test_a_computing_peer_is_awaited_until_it_makes_no_progress(
    patient: MembershipView, clock: Clock
) -> None:
    patient.receive(heartbeat("a", version=2, round=7, samples=5))
    clock.now += STRAGGLER
    patient.receive(heartbeat("a", version=2, round=7, samples=5), idle=STRAGGLER)  # a heartbeat
    assert names(patient.participants()) == ["a", "own"]
    clock.now += 0.1
    assert names(patient.participants()) == ["own"]
    assert patient.live_peers() == 1 and patient.samples() == 0
    assert patient.newest_round() == 7, "its finished round counts"
    assert patient.lost() == frozenset(), "it lives"
    patient.receive(heartbeat("a", version=3, round=7, samples=9))
    assert names(patient.participants()) == ["a", "own"]


def test_a_peer_that_waits_in_a_round_is_no_straggler(
    patient: MembershipView, clock: Clock
) -> None:
    patient.receive(heartbeat("a", round=3, entered=4))
    clock.now += 2 * STRAGGLER
    assert names(patient.participants()) == ["a", "own"]


def test_a_newcomer_receives_the_idle_times(patient: MembershipView, clock: Clock) -> None:
    patient.receive(heartbeat("a"))
    clock.now += STRAGGLER - 1.0
    newcomer = MembershipView(heartbeat("new"), 1e6, clock, STRAGGLER)
    pass_on(patient, newcomer)
    assert "a" in names(newcomer.participants())
    clock.now += 1.1
    assert "a" not in names(newcomer.participants())


def test_a_peer_on_a_break_is_not_awaited_but_its_round_counts(view: MembershipView) -> None:
    view.receive(heartbeat("a", round=9, averaged=9, samples=3, takes_part=False, away=True))
    view.receive(heartbeat("left", round=11, averaged=11, takes_part=False))
    assert names(view.participants()) == ["own"]
    assert (view.newest_round(), view.newest_averaged()) == (9, 9)
    assert view.lost() == frozenset()


def test_a_peer_that_was_met_in_a_group_can_take_part_whatever_it_has_announced(
    view: MembershipView,
) -> None:
    view.receive(heartbeat("a", round=2))
    view.receive(heartbeat("b", round=2))
    view.announce(round=5)
    assert view.live_peers() == 1
    view.note_group(5, [b"a", b"own", b"unknown"])
    assert view.live_peers() == 2


def test_an_awaited_peer_of_a_round_without_a_group_is_awaited_in_the_next_one(
    view: MembershipView, clock: Clock
) -> None:
    view.receive(heartbeat("a", version=1, round=6, averaged=6))
    view.receive(heartbeat("slow", version=1, round=4, averaged=4))
    for round_ in (7, 8, 9):  # shorter than the way of a message
        view.note_unmet(round_)
        view.announce(round=round_, averaged=round_)
    rounds = {m.peer_id: m.round for m in view.members("averaged")}
    assert rounds == {b"own": 9, b"a": 8, b"slow": 4}
    assert view.live_peers() == 2
    view.receive(heartbeat("a", version=2, round=7, averaged=8))  # late, and not the last one
    assert view.live_peers() == 2
    view.receive(heartbeat("a", version=3, round=6, averaged=9))  # it has ended the round: known
    assert view.live_peers() == 1


def test_news_of_a_round_without_a_group_are_awaited_for_as_long_as_silence(
    view: MembershipView, clock: Clock
) -> None:
    view.receive(heartbeat("a", version=1, round=6, averaged=6))
    for round_ in (7, 8, 9):
        view.note_unmet(round_)
        view.announce(round=round_, averaged=round_)
    clock.now += SILENCE
    view.receive(heartbeat("a", version=1))  # it lives, and is where it was
    assert view.live_peers() == 1


def test_a_peer_without_which_a_round_began_is_left_out_until_it_caught_up(
    view: MembershipView,
) -> None:
    view.receive(heartbeat("a", round=4))
    view.receive(heartbeat("b", round=4))
    view.note_group(5, [b"own", b"a"], quorum=True)

    def left_out() -> set[bytes]:
        return {m.peer_id for m in view.members("averaged") if m.left_out}

    assert left_out() == {b"b"}
    view.receive(heartbeat("a", version=2, round=5))
    assert left_out() == {b"b"}
    view.receive(heartbeat("b", version=2, round=5))
    assert left_out() == set()


def test_a_peer_that_came_after_the_gradients_is_not_awaited_with_its_parameters(
    view: MembershipView,
) -> None:
    """It waits for the end of the round, and would be awaited until its window ends."""
    for name in ("met", "entered", "late"):
        view.receive(heartbeat(name, round=4, averaged=4, synchronised=4))
    view.announce(round=4, averaged=4, synchronised=4)

    def left_out(**options: bool) -> set[bytes]:
        members = view.members("synchronised", computes=False, **options)
        return {member.peer_id for member in members if member.left_out}

    assert left_out() == set()
    view.note_group(5, [b"own", b"met"])
    view.announce(averaged=5, met_averaged=5)
    view.receive(heartbeat("entered", version=2, round=4, averaged=4, synchronised=4, entered=5))
    assert left_out() == {b"late"}
    assert left_out(one_group=False) == set(), "a pair knows nothing of other pairs"
    assert not any(member.left_out for member in view.members("averaged"))
    view.announce(round=5, synchronised=5)
    assert left_out() == set()


def test_without_a_quorum_no_peer_is_left_out(view: MembershipView) -> None:
    view.receive(heartbeat("a", round=4))
    view.note_group(5, [b"own"])
    assert not any(member.left_out for member in view.members("averaged"))
