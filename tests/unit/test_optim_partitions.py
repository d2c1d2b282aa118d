"""Peers that are lost and come back, and the weights of the sides of a partition."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import pytest

from rayhive.averaging.state_averager import weights
from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.membership.view import Heartbeat, MembershipView, Reunion
from rayhive.optim.peer_state import PartitionHistory
from tests.unit.averaging_fakes import OTHER, PEER
from tests.unit.clock_fakes import Clock
from tests.unit.optim_fakes import ROUND, Peer

SILENCE = 4.0


def heartbeat(name: str, version: int = 1, **fields: object) -> Heartbeat:
    return Heartbeat(name.encode(), 0.0, **{"version": version, "takes_part": True, **fields})


@pytest.fixture
def view(clock: Clock) -> MembershipView:
    return MembershipView(heartbeat("own"), SILENCE, clock)


def stand_in(view: MembershipView, round_: int) -> None:
    view.own = dataclasses.replace(view.own, round=round_)


def test_a_reunion_names_the_lost_peers_and_the_round_of_the_loss(
    view: MembershipView, clock: Clock
) -> None:
    for name in ("a", "b", "c"):
        view.receive(heartbeat(name))
    stand_in(view, 5)
    clock.now += SILENCE + 1
    view.receive(heartbeat("c", 2))
    view.note_losses()
    stand_in(view, 9)
    view.note_losses()
    assert view.take_reunion() is None
    view.receive(heartbeat("a", 2))
    view.receive(heartbeat("b", 2), age=0.5)
    assert view.take_reunion() == Reunion(5, frozenset({b"a", b"b"}))
    assert view.take_reunion() is None, "it is reported once"
    assert view.is_alive(b"a") and not view.is_alive(b"b"), "a relayed announcement does not revive"


def test_a_lost_peer_of_which_others_pass_on_news_is_lost_once(
    view: MembershipView, clock: Clock
) -> None:
    """Its link may take longer to heal than those of the peers that pass its news on."""
    view.receive(heartbeat("a"))
    view.give_up(b"a")
    assert not view.is_present(b"a")
    view.receive(heartbeat("a", 2), age=0.1)
    assert view.take_reunion() == Reunion(0, frozenset({b"a"}))
    for version in range(3, 6):
        stand_in(view, version)
        clock.now += SILENCE / 2
        view.receive(heartbeat("a", version), age=0.1)
        view.note_losses()
        assert view.is_present(b"a") and not view.is_alive(b"a")
    assert view.take_reunion() is None
    clock.now += SILENCE
    view.note_losses()
    assert not view.is_present(b"a")
    view.receive(heartbeat("a", 6))
    assert view.take_reunion() == Reunion(5, frozenset({b"a"}))


def test_older_news_of_a_peer_do_not_undo_its_loss(view: MembershipView, clock: Clock) -> None:
    view.receive(heartbeat("a"))
    clock.now += 1.0
    view.give_up(b"a")
    view.receive(heartbeat("a", 2), age=1.5)
    assert not view.is_present(b"a")


def test_a_peer_that_said_goodbye_is_not_lost(view: MembershipView, clock: Clock) -> None:
    view.receive(heartbeat("a"))
    view.receive(heartbeat("a", 2, takes_part=False))
    clock.now += SILENCE + 1
    view.note_losses()
    view.receive(heartbeat("a", 3))
    assert view.take_reunion() is None


def test_a_peer_that_was_cut_off_on_a_break_comes_back_from_a_partition(
    view: MembershipView, clock: Clock
) -> None:
    view.receive(heartbeat("a"))
    view.receive(heartbeat("a", 2, takes_part=False, away=True))
    stand_in(view, 3)
    clock.now += SILENCE + 1
    view.note_losses()
    view.receive(heartbeat("a", 3))
    assert view.take_reunion() == Reunion(3, frozenset({b"a"}))


def test_an_unreachable_peer_is_lost_at_once(view: MembershipView) -> None:
    view.receive(heartbeat("a", addresses=("/ip4/10.0.0.1/tcp/1",)))
    stand_in(view, 3)
    view.give_up(b"a")
    assert not view.is_alive(b"a") and view.addresses_of(b"a") == ("/ip4/10.0.0.1/tcp/1",)
    view.receive(heartbeat("a", 2))
    assert view.take_reunion() == Reunion(3, frozenset({b"a"}))


X, Y = ("a", "b"), ("c", "d")


def test_without_a_partition_all_peers_count_alike() -> None:
    assert weights({peer: ((), None) for peer in "abc"}) == dict.fromkeys("abc", 1.0)


def test_a_side_counts_by_the_rounds_that_it_committed() -> None:
    found = weights({"a": (X, 30), "b": (X, 30), "c": (Y, 10), "d": (Y, 10)})
    assert found["a"] + found["b"] == pytest.approx(3 * (found["c"] + found["d"]))
    assert found["a"] == 1.0


def test_unequal_sides_count_by_their_rounds_and_not_by_their_size() -> None:
    three = ("a", "b", "c")
    found = weights({**{peer: (three, 12) for peer in three}, "d": (("d",), 12)})
    assert found["a"] + found["b"] + found["c"] == pytest.approx(found["d"])


def test_a_side_counts_the_same_whether_its_members_come_together_or_not() -> None:
    """The average of some of them has the weight of what it holds, in the next average."""
    value = {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0}
    told = {"a": (X, 30), "b": (X, 30), "c": (Y, 10), "d": (Y, 10)}
    for group in ("abc", "abcd"):
        found = weights({peer: told[peer] for peer in group})
        total = sum(found.values())
        mean = sum(found[peer] * value[peer] for peer in group) / total
        value |= dict.fromkeys(group, mean)
    assert value == pytest.approx(dict.fromkeys("abcd", 0.75))


def test_two_sides_of_one_peer_each_are_two() -> None:
    found = weights({"a": (("a",), 30), "b": (("b",), 10)})
    assert found["a"] == pytest.approx(3 * found["b"])


def test_a_side_without_committed_rounds_has_next_to_no_weight() -> None:
    found = weights({"a": (X, 30), "b": (X, 30), "c": (("c",), 0)})
    assert found["c"] < 1e-6 < found["a"]


def test_a_newcomer_counts_like_the_average_of_the_other_peers() -> None:
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


def reunion(since: int, peers: str) -> Reunion:
    return Reunion(since, frozenset(peer.encode() for peer in peers))


def test_a_peer_lost_again_for_a_moment_does_not_reduce_the_committed_rounds() -> None:
    """Otherwise a side whose links flap while they recover would count for nothing."""
    history = PartitionHistory()
    for group in ("abcd", "ab"):
        history.note_group(peer.encode() for peer in group)
    side = {b"a", b"b"}
    history.note_reunion(reunion(20, "c"), 30, side | {b"c"})
    assert (history.rounds_apart, history.side, history.lost) == (10, [b"a", b"b"], {b"c"})
    history.note_group({b"a", b"b", b"c"})
    history.note_reunion(reunion(30, "c"), 30, side | {b"c"})
    assert (history.rounds_apart, history.side, history.lost) == (10, [b"a", b"b"], {b"c"})
    # back later, after two more rounds
    history.note_reunion(reunion(20, "d"), 32, side | {b"c", b"d"})
    assert (history.rounds_apart, history.side) == (12, [b"a", b"b"])
    assert history.lost == {b"c", b"d"}


def test_a_side_holds_its_live_peers_although_a_round_was_done_alone() -> None:
    """A round fails easily while links recover; the parameters of its peers are still alike."""
    history = PartitionHistory()
    for group in ("abcdef", "abc", "ab", "a"):
        history.note_group(peer.encode() for peer in group)
    history.note_reunion(reunion(20, "de"), 30, {b"a", b"b", b"d", b"e"})  # c and f are dead
    assert history.side == [b"a", b"b"]


@pytest.mark.parametrize(
    ("group", "alive", "over"),
    [
        ("abcd", "", True),
        ("abc", "", True),
        ("abc", "d", False),
        ("ab", "", False),
        ("acd", "", True),
        ("acd", "b", False),
    ],
)
def test_a_partition_ends_once_no_live_peer_of_either_side_is_missing(
    group: str, alive: str, over: bool
) -> None:
    history = PartitionHistory()
    history.note_group({b"a", b"b"})
    history.note_reunion(reunion(20, "cd"), 30, {b"a", b"b", b"c", b"d"})
    living = {peer.encode() for peer in alive}
    history.note_averaged(
        {peer.encode() for peer in group}, lambda peers: bool(living & set(peers))
    )
    assert (history.rounds_apart is None) is over


def test_rounds_that_were_skipped_are_not_counted_as_done(view: MembershipView) -> None:
    """A side that jumps to the other side's round did not commit the rounds between."""
    for name in ("a", "b"):
        view.receive(heartbeat(name))
    stand_in(view, 5)
    view.give_up(b"a")
    view.give_up(b"b")
    stand_in(view, 9)
    view.receive(heartbeat("a", 2))
    stand_in(view, 50)
    view.skip(41)
    assert view.take_reunion() == Reunion(46, frozenset({b"a"}))
    view.receive(heartbeat("b", 2))
    assert view.take_reunion() == Reunion(46, frozenset({b"b"})), "four rounds, as before"


def test_a_peer_that_skips_rounds_did_not_commit_them() -> None:
    dht = SimpleNamespace(client_mode=False, peer_id=PEER)
    tracker = LiveProgressTracker(dht, "run", target_batch_size=8, start=False)
    gone = OTHER.to_bytes()
    tracker.view.receive(Heartbeat(gone, 1.0, version=1, takes_part=True))
    tracker.update_epoch(5)
    tracker.view.give_up(gone)
    tracker.update_epoch(9)
    tracker.skip_to(50)
    assert tracker.local_progress.epoch == 50
    tracker.view.receive(Heartbeat(gone, 1.0, version=2, takes_part=True))
    assert tracker.swarm.take_reunion() == Reunion(46, frozenset({gone})), "four rounds were done"


@pytest.mark.parametrize(
    ("groups", "since", "none"),
    [
        (["abcd", "abcd"], 3, True),
        (["ab", "abcd", "abcd"], 3, True),
        (["abcd", "abc"], 3, False),
        (["abc", "abcd"], 3, False),
        (["abcd"], 5, False),  # it was away for less than a round: did the others go on?
        (["abcd"], 3, False),  # nobody knows about the round before
    ],
)
def test_lost_peers_that_were_in_every_group_were_not_away(
    groups: list[str], since: int, none: bool
) -> None:
    history = PartitionHistory()
    for group in groups:
        history.note_group(peer.encode() for peer in group)
    assert history.was_none(reunion(since, "cd"), 5) is none


def relay(peer: Peer, version: int, round_: int) -> None:
    """Hear of the lost peer through a third one, which has joined the other side's round."""
    view, known = peer.tracker.view, peer.tracker.view.find(OTHER.to_bytes())
    fields = {"takes_part": True, "round": round_}
    view.receive(Heartbeat(b"third", 0.0, version=version, **fields))
    view.receive(dataclasses.replace(known, version=known.version + 1, round=round_), age=1e-6)


def test_a_peer_that_hears_of_the_other_side_through_a_third_one_keeps_its_work() -> None:
    """The third one has joined the other side's round; the link to that side has not healed."""
    peer = Peer()
    peer.tracker.view.give_up(OTHER.to_bytes())
    for round_ in range(ROUND + 1, ROUND + 6):
        peer.partitions.note_group({PEER.to_bytes(), b"third"})
        peer.tracker.update_epoch(round_)
    peer.state_averager.local_epoch = ROUND + 5
    relay(peer, version=1, round_=ROUND + 50)
    assert not peer.sync.needs_download()
    assert dict(peer.events)["reunited"]["apart"] == 5
    peer.tracker.view.note_losses()
    relay(peer, version=2, round_=ROUND + 51)
    side = sorted([PEER.to_bytes().hex(), b"third".hex()])
    assert peer.sync.gathered(ROUND + 52) == [ROUND + 52, side, 5]
    assert not peer.state_averager.downloads
