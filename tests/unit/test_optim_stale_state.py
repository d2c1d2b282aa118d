"""Peers whose parameters are older than their round: what they share, and when they wait."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.optim_fakes import ROUND, Peer

NEXT = ROUND + 1


def test_a_stale_state_is_shared_under_the_round_that_it_is_of() -> None:
    peer = Peer()
    peer.hear(round=NEXT + 1, averaged=NEXT + 1)
    peer.sync.download()
    averager: Any = peer.state_averager
    assert (averager.state_sharing_priority, averager.stale_round) == (NEXT, NEXT)
    peer.sync.share_round(NEXT + 2)  # rounds of gradients do not make up for it
    assert (averager.state_sharing_priority, averager.stale_round) == (NEXT, NEXT)
    peer.consistency.note_averaged(NEXT + 3)
    peer.sync.share_round(NEXT + 3)
    assert (averager.state_sharing_priority, averager.stale_round) == (NEXT + 3, None)


@pytest.mark.parametrize("untrained", [False, True])
def test_a_peer_without_the_state_runs_no_round_while_those_that_have_it_rest(
    untrained: bool,
) -> None:
    peer = Peer()
    if untrained:
        peer.state.set_untrained(True)
    else:
        peer.consistency.note_jump(behind=True, keeps_gradients=False)
    away = {"takes_part": False, "away": True}
    for fields, begins in (({}, True), (away, False), ({}, True)):
        peer.hear(round=ROUND, averaged=ROUND, **fields)
        assert peer.sync.catch_up() is begins


def test_a_failed_download_leaves_the_round_of_stale_parameters() -> None:
    peer = Peer()
    peer.hear(round=NEXT + 1, averaged=NEXT + 1)
    peer.sync.download()
    averager: Any = peer.state_averager
    averager.newest = NEXT - 1  # nobody has a newer state
    peer.hear(round=NEXT + 3, averaged=NEXT + 3)
    peer.sync.download()
    assert averager.stale_round == NEXT and peer.consistency.stale
