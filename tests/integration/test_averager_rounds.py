"""Real averagers when a group grows, shrinks, loses a member or ends."""

from __future__ import annotations

import pytest

from tests.integration.averager_harness import run_scenario

pytestmark = pytest.mark.swarm


def test_a_silent_member_makes_the_round_partial() -> None:
    told = run_scenario("partial_round")
    for result in told["rounds"]:
        assert result["group_size"] == 3
        # As a sender a peer loses what the mute one should have reduced, as a reducer a third.
        assert 0.4 < result["fraction"] < 0.7
        assert result["banned"] == [told["mute"]]
        assert result["sent_bytes"] > result["received_bytes"]
        assert result["error"] is None


def test_rounds_begin_when_the_live_peers_are_there() -> None:
    """The matchmaking window lasts longer than the scenario may take."""
    before, after = run_scenario("growing_group", limit=55)
    assert [result["group_size"] for result in before] == [2, 2]
    assert [result["group_size"] for result in after] == [3, 3, 3]
    assert all(result["fraction"] == 1.0 for result in (*before, *after))


def test_a_waiting_group_begins_when_the_missing_peer_is_given_up() -> None:
    told = run_scenario("shrinking_group", limit=55)
    assert told["too_early"] == [False, False]
    assert told["sizes"] == [2, 2]


def test_a_plain_hivemind_peer_can_join() -> None:
    """RPCs carry the name of hivemind's class, so both kinds of peers find each other."""
    told = run_scenario("plain_peer")
    assert told["sizes"] == [2, 2]
    assert told["error"] < 1e-6
    assert told["ours"]["fraction"] == 1.0
    ours, theirs = told["names"]
    assert ours == theirs


def test_rounds_of_the_state_averager_are_recorded_and_a_dead_one_is_harmless() -> None:
    told = run_scenario("state_and_shutdown")
    for (result,) in told["rounds"]:
        assert result["group_size"] == 2
        assert result["fraction"] == 1.0
    assert told["loaded"]
    assert told["alive"] == [False, False]


def test_a_search_ends_with_its_averager_and_spares_the_dht() -> None:
    """hivemind leaves the search running; its messages crash the DHT, whose p2pd stays behind."""
    told = run_scenario("shutdown_while_searching", limit=55)
    assert told == {"ended": "cancelled", "recorded": 0, "exit codes": [0, 0]}
