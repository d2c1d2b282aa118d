"""Real swarms in which rounds begin with a quorum, and one peer is slow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.test_waiting import (
    BATCH,
    assert_equal_parameters,
    assert_samples_conserved,
    of,
    story,
    swarm,
)

pytestmark = [pytest.mark.swarm, pytest.mark.usefixtures("forks")]

SLOW_S = 2.0


@pytest.mark.slow
@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_peer_does_not_hold_the_others_and_its_samples_count(slow: int) -> None:
    """Its batch takes longer than several rounds. Peer 0 leads the groups that it is in."""
    peers: list[dict[str, Any]] = [{"batch_s": 0.1} for _ in range(3)]
    peers[slow]["batch_s"] = SLOW_S
    told = swarm(peers, rounds=30, target=4 * BATCH, min_peers=2, grace_s=0.2)
    assert_samples_conserved(told)
    fast = [peer for number, peer in enumerate(told) if number != slow]
    last = min(of(peer, "transition")[-1]["round"] for peer in fast)
    ended = min(of(peer, "transition")[-1]["t"] for peer in fast)
    for peer in told:  # afterwards the slow peer goes on alone
        peer["events"] = [e for e in peer["events"] if e["t"] < ended and e.get("round", 0) < last]
    late = of(told[slow], "round")
    assert {event["outcome"] for event in late} == {"averaged"}, story(told)
    assert sum(event["group_size"] == 3 for event in late) >= 2, story(told)
    for peer in fast:
        sizes = [event["group_size"] for event in of(peer, "round")]
        assert sizes.count(2) > sizes.count(3), story(told)
    loaded = [event for event in of(told[slow], "state_loaded") if event["kept"]]
    assert len(loaded) >= 2, story(told)
    assert_equal_parameters(told, after=0.0)
