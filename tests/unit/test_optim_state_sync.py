"""State synchronisation of a peer that missed rounds or comes back from a break."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from rayhive.averaging.round_result import PhaseRecord, RoundResult
from rayhive.errors import PeerError
from rayhive.membership import progress_view
from rayhive.membership.progress_tracker import BREAK_S
from rayhive.membership.view import Heartbeat, Reunion
from rayhive.optim import state_sync
from tests.unit.averaging_fakes import OTHER, PEER
from tests.unit.clock_fakes import Clock
from tests.unit.optim_fakes import ROUND, Peer

NEXT = ROUND + 1
COMPLETE = PhaseRecord(name="dense", seconds=0.1, sent_bytes=8, received_bytes=8, fraction=1.0)


def lose(peer: Peer) -> None:
    """Lose the other peer, and go on for five rounds."""
    peer.tracker.view.give_up(OTHER.to_bytes())
    peer.tracker.jump_to(ROUND + 5)
    peer.state_averager.local_epoch = ROUND + 5


def hear_of_return(peer: Peer, round_: int) -> None:
    """Hear directly from the other peer, which was lost, that it is in a later round."""
    peer.hear(round=round_, averaged=round_, met_averaged=round_)
    peer.tracker.view.receive(peer.tracker.view.known()[0])


@pytest.mark.parametrize("missed", [True, False])
def test_a_peer_back_from_a_break_downloads_the_state_if_it_missed_a_round(
    missed: bool, clock: Clock
) -> None:
    peer = Peer(clock=clock)
    peer.accumulate()
    peer.tracker.end_batch()
    clock.now += 2 * BREAK_S
    peer.tracker.check_break()
    assert not peer.tracker.takes_part
    if missed:
        peer.hear(round=NEXT, averaged=NEXT)
    peer.sync.return_from_break()
    assert peer.tracker.takes_part
    assert peer.kinds() == (["state_loaded", "stepped_in"] if missed else ["stepped_in"])
    fields = peer.events[-1][1]
    assert fields == {
        "round_before": ROUND,
        "round": NEXT if missed else ROUND,
        "seconds": 2 * BREAK_S,
    }
    assert peer.grad_averager.local_samples_accumulated == 32, "they enter the next round"


@pytest.mark.parametrize(
    ("met", "apart", "loads"), [(NEXT, False, True), (ROUND, False, False), (NEXT, True, False)]
)
def test_a_round_that_began_just_when_a_peer_was_back_is_not_run_alone(
    met: int, apart: bool, loads: bool
) -> None:
    peer = Peer()
    peer.hear(round=NEXT, averaged=NEXT, met_averaged=met)
    if apart:
        back = frozenset({OTHER.to_bytes()})
        peer.partitions.note_reunion(Reunion(1, back), ROUND, back)
    assert peer.sync.take_over_missed_round() is loads
    assert peer.state_averager.downloads == int(loads)


def test_a_download_that_takes_longer_than_a_round_leaves_stale_parameters() -> None:
    peer = Peer()
    peer.accumulate()
    peer.hear(round=NEXT + 1, averaged=NEXT + 1)
    peer.sync.download()
    loaded: dict[str, Any] = dict(peer.events)["state_loaded"]
    assert (loaded["round_of_state"], loaded["round"], loaded["kept"]) == (NEXT, NEXT + 1, 0)
    assert peer.consistency.stale and not peer.consistency.gradients_count
    assert peer.consistency.settling


def test_a_peer_far_behind_needs_a_download_unless_it_settles() -> None:
    peer = Peer()
    peer.hear(round=ROUND + 1, averaged=ROUND + 1)
    assert not peer.sync.needs_download(), "one round behind, it can still take part"
    peer.hear(round=ROUND + 2, averaged=ROUND + 2)
    assert peer.sync.needs_download()
    peer.consistency.settling = True
    assert not peer.sync.needs_download()
    assert peer.state_averager.local_epoch == ROUND + 2


def test_a_side_of_a_partition_joins_the_newest_round_with_its_own_work() -> None:
    peer = Peer()
    lose(peer)
    hear_of_return(peer, ROUND + 9)
    assert not peer.sync.needs_download()
    assert peer.state_averager.local_epoch == ROUND + 9
    assert dict(peer.events)["reunited"] == {
        "round_before": ROUND + 5,
        "round": ROUND + 9,
        "apart": 5,
    }
    assert peer.sync.gathered(ROUND + 10) == [ROUND + 10, [], 5]


def test_a_side_of_a_partition_that_heals_during_a_break_keeps_its_work(clock: Clock) -> None:
    peer = Peer(clock=clock)
    lose(peer)
    peer.tracker.end_batch()
    clock.now += 2 * BREAK_S
    peer.tracker.check_break()
    hear_of_return(peer, ROUND + 9)
    peer.sync.return_from_break()
    assert peer.kinds() == ["stepped_in"]
    assert not peer.sync.needs_download()
    assert peer.kinds() == ["stepped_in", "reunited"] and not peer.state_averager.downloads


def test_a_partition_that_heals_while_it_is_checked_costs_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer = Peer()
    lose(peer)
    take_reunion = peer.tracker.swarm.take_reunion

    def heal_just_after() -> Any:
        reunion = take_reunion()
        hear_of_return(peer, ROUND + 9)
        return reunion

    monkeypatch.setattr(peer.tracker.swarm, "take_reunion", heal_just_after)
    assert not peer.sync.needs_download()
    assert not peer.sync.needs_download()
    assert peer.kinds() == ["reunited"]


def test_refused_parameters_are_replaced_once() -> None:
    peer = Peer()
    peer.consistency.diverged = True
    assert peer.sync.needs_download()
    assert not peer.sync.needs_download()


@pytest.mark.parametrize(
    ("round_", "behind", "knew", "keeps"),
    [(ROUND, 0, True, True), (ROUND, 2, True, True), (0, 0, True, True), (0, 0, False, False)],
    ids=["missed rounds", "began behind", "first batch", "first batch of a joiner"],
)
def test_gradients_of_missed_rounds_are_kept_if_they_are_of_parameters_of_the_run(
    round_: int, behind: int, knew: bool, keeps: bool
) -> None:
    peer = Peer(live_peers=1)
    peer.tracker.quorum = True
    peer.state_averager.local_epoch = round_
    peer.tracker.view.restate(round=round_)
    if knew:
        peer.hear(round=round_ + behind, averaged=round_ + behind)
    peer.sync.note_batch()
    assert peer.state_averager.downloads == (behind > 1), "before the batch"
    newest = round_ + behind + 5
    peer.hear(round=newest, averaged=newest, met_averaged=newest)
    assert peer.sync.needs_download() is not keeps


def test_a_late_peer_loads_the_newest_state_once_and_is_in_step_again() -> None:
    peer = Peer()
    peer.tracker.quorum = True
    peer.sync.note_batch()
    peer.accumulate()
    newest = peer.state_averager.newest = ROUND + 5
    peer.hear(round=newest, averaged=newest, met_averaged=newest)
    peer.tracker.hurry(newest + 1)  # the next round is due
    assert peer.sync.catch_up()
    assert peer.state_averager.downloads == 1 and peer.state_averager.local_epoch == newest
    assert peer.grad_averager.local_samples_accumulated == 32
    assert peer.state.averaging_reason is None, "its replica equals the others"
    assert peer.tracker.view.own.entered == newest + 1, "the others need not wait for a batch"
    assert dict(peer.events)["state_loaded"]["kept"] == 32


def test_a_late_peer_whose_download_is_overtaken_asks_for_an_averaging() -> None:
    peer = Peer()
    peer.tracker.quorum = True
    peer.sync.note_batch()
    peer.accumulate()
    peer.hear(round=ROUND + 5, averaged=ROUND + 5, met_averaged=ROUND + 5)
    peer.state_averager.newest = ROUND + 4
    peer.tracker.hurry(ROUND + 6)
    assert peer.sync.catch_up()
    assert peer.state.averaging_reason == "joined"
    assert peer.consistency.stale and peer.consistency.gradients_count


@pytest.mark.parametrize(
    ("quorum", "lasting", "downloads"), [(True, False, 1), (False, False, 2), (False, True, 3)]
)
def test_a_late_peer_downloads_seldom_where_rounds_are_shorter_than_a_download(
    quorum: bool, lasting: bool, downloads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_sync, "takes_over_state", lambda kind: lasting)
    peer = Peer()
    peer.tracker.quorum = quorum
    peer.sync.note_batch()
    peer.accumulate()
    for newest in (ROUND + 5, ROUND + 6, ROUND + 7):  # it misses each of them
        peer.state_averager.newest = newest
        peer.hear(round=newest, averaged=newest, met_averaged=newest)
        assert peer.sync.take_over_missed_round()
        assert peer.state_averager.local_epoch == newest
    assert peer.state_averager.downloads == downloads
    assert peer.state.averaging_reason == "joined" and peer.consistency.gradients_count
    assert peer.grad_averager.local_samples_accumulated == 32


def joiner(newest: int, loads: int) -> Peer:
    """Return a peer that has not trained yet, in a swarm that has.

    Args:
        newest: The round of the other peer.
        loads: The round of the state that it gets; 0 if it gets none.
    """
    peer = Peer()
    peer.state_averager.local_epoch = 0
    peer.state_averager.newest = loads
    peer.tracker.jump_to(0)
    peer.hear(round=newest, averaged=newest)
    return peer


def test_a_joiner_that_loads_the_state_shares_it() -> None:
    peer = joiner(newest=5, loads=5)
    assert peer.sync.needs_download()
    peer.sync.download()
    assert not peer.state.untrained and peer.state_averager.allow_state_sharing
    assert not peer.sync.needs_download()


def test_a_joiner_without_the_state_gets_it_in_an_averaging_with_a_trained_peer() -> None:
    peer = joiner(newest=5, loads=0)
    peer.sync.download()
    assert peer.state.untrained and peer.state_averager.local_epoch == 5
    assert not peer.state_averager.allow_state_sharing
    assert not peer.sync.needs_download(), "the other peer may not be able to share its state"
    for trained in (False, True):
        peer.hear(round=5, averaged=5, untrained=not trained)
        peer.state_averager.control = control = Future[Any]()
        assert peer.parameter_rounds.begin(6) is control
        control.set_result(RoundResult({PEER: None, OTHER: None}, phases=(COMPLETE,)))
        assert peer.state.untrained is not trained
    assert peer.state_averager.allow_state_sharing


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_joiner_fails_when_no_peer_with_the_state_of_the_run_is_left(moment: str) -> None:
    """Before it began the download, or after it could not get the state from a live peer."""
    peer = joiner(newest=5, loads=0)
    if moment == "after":
        peer.sync.download()
        peer.accumulate()
    peer.tracker.view.give_up(OTHER.to_bytes())
    assert peer.sync.needs_download()
    with pytest.raises(PeerError, match=r"the state of the run is lost.* after round 5"):
        peer.sync.download()
    assert not peer.state_averager.allow_state_sharing
    round_ = peer.gradient_rounds.open(6, accumulating_s=0.0, background_s=0.0)
    assert round_.samples == 0, "gradients of a peer without the state do not count"


def test_a_joiner_waits_for_a_peer_with_the_state_that_is_out_of_reach() -> None:
    peer = joiner(newest=5, loads=5)
    peer.tracker.view.give_up(OTHER.to_bytes())
    peer.state_averager.newest = 0

    def back() -> None:
        peer.state_averager.newest = 7
        peer.hear(round=7, averaged=7)
        peer.tracker.view.receive(peer.tracker.view.known()[0])

    peer.state.watchdog.check = back  # type: ignore[method-assign]
    peer.sync.download()
    assert not peer.state.untrained and peer.state_averager.local_epoch == 7


def test_a_peer_that_began_with_the_others_goes_on_alone() -> None:
    peer = joiner(newest=1, loads=0)
    peer.tracker.view.give_up(OTHER.to_bytes())
    assert not peer.sync.needs_download(), "it has the parameters with which the run began"


def test_a_joiner_loads_the_state_that_a_peer_shared_although_it_does_not_know_the_peer() -> None:
    peer = Peer(live_peers=1)
    peer.state_averager.local_epoch = peer.state_averager.newest = 0
    peer.tracker.jump_to(0)
    with pytest.raises(PeerError, match="after round 4"):
        peer.sync.download(shared=4)


@pytest.mark.parametrize("newest", [0, 1])
def test_a_peer_that_was_lost_before_the_first_round_costs_no_averaging(newest: int) -> None:
    peer = joiner(newest=0, loads=0)
    peer.tracker.view.give_up(OTHER.to_bytes())
    peer.tracker.view.note_losses()
    hear_of_return(peer, newest)
    assert not peer.sync.needs_download()
    assert peer.state.averaging_reason == (None if newest == 0 else "partition")
    assert peer.partitions.rounds_apart == (None if newest == 0 else 0)


@pytest.mark.parametrize("together", [True, False])
def test_a_peer_that_was_in_the_groups_although_taken_for_lost_costs_no_averaging(
    together: bool,
) -> None:
    peer = Peer()
    lose(peer)
    for _ in range(5):
        peer.partitions.note_group({PEER.to_bytes(), *([OTHER.to_bytes()] if together else [])})
    hear_of_return(peer, ROUND + 5)
    assert not peer.sync.needs_download()
    assert peer.state.averaging_reason == (None if together else "partition")


def test_a_lost_peer_that_came_back_and_died_keeps_nobody_from_catching_up() -> None:
    """Parameters were never averaged with it, and never will be."""
    peer, other, lost = Peer(every=None), OTHER.to_bytes(), b"lost"
    view = peer.tracker.view

    def hear_lost() -> None:
        known = view.find(lost)
        version = 1 if known is None else known.version + 1
        view.receive(Heartbeat(lost, 0.0, version=version, takes_part=True, round=ROUND))

    def go_on(number: int) -> None:
        peer.partitions.note_group({PEER.to_bytes(), other})
        peer.state_averager.local_epoch = number
        peer.tracker.update_epoch(number)
        peer.hear(round=number, averaged=number, met_averaged=number)

    hear_lost()
    peer.partitions.note_group({PEER.to_bytes(), other, lost})
    view.give_up(lost)
    for number in (ROUND + 1, ROUND + 2):
        go_on(number)
    hear_lost()
    peer.sync.note_reunion()
    assert peer.state.rounds_apart == 2 and peer.state.merges_rounds
    view.give_up(lost)
    go_on(ROUND + 3)
    assert peer.state.rounds_apart is None and not peer.state.merges_rounds
    newest = peer.state_averager.newest = ROUND + 50
    peer.hear(round=newest, averaged=newest, met_averaged=newest)
    assert peer.sync.needs_download(), "its own parameters are 47 rounds old"
    view.note_losses()
    view.receive(Heartbeat(b"third", 0.0, version=1, takes_part=True, round=newest))
    view.give_up(b"third")
    view.receive(Heartbeat(b"third", 0.0, version=2, takes_part=True, round=newest))
    peer.sync.note_reunion()
    assert peer.partitions.lost == {b"third"}, "the next partition begins anew"


@pytest.mark.parametrize("others", [1, 2])
def test_late_peers_of_a_quorum_do_not_wait_for_each_other(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the peers that computed have left, one of the late peers computes."""
    monkeypatch.setattr(progress_view, "ALL_WAIT_S", 0.2)
    peer = Peer(live_peers=1)
    peer.tracker.quorum = True
    view, newest = peer.tracker.view, ROUND + 10

    def hear(name: bytes, version: int, **fields: Any) -> None:
        usual = {"takes_part": True, "round": newest, "averaged": newest, "met_averaged": newest}
        with view.lock:
            view.receive(Heartbeat(name, 0.0, version=version, **{**usual, **fields}))
            view.lock.notify_all()

    peer.sync.note_batch()
    hear(b"fast", 1)
    for number in range(others):
        hear(b"late%d" % number, 1, entered=newest + 1, samples=8)
    peer.state_averager.newest = newest
    peer.accumulate(8)
    results: list[bool] = []
    waiting = threading.Thread(target=lambda: results.append(peer.sync.catch_up()), daemon=True)
    waiting.start()
    waiting.join(1.0)
    assert waiting.is_alive(), "the fast peer computes"
    hear(b"fast", 2, takes_part=False)  # it leaves
    waiting.join(10.0)
    assert results == [False]
    assert view.own.entered == view.own.round == newest, "it computes, and others can wait for it"
