"""Rounds of real peers on a link that is so slow that heartbeats wait for seconds."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import bulk_rounds
from benchmarks.shaped_peers import nodes
from tests.integration.testbed_helpers import needs_testbed

pytestmark = [needs_testbed, pytest.mark.slow]

MEGABYTES, RATE_MBIT, RTT_MS, QUEUE_S = 4.0, 4.0, 80.0, 6.0


@pytest.mark.parametrize("daemon", [False, True], ids=["links", "daemon"])
def test_no_peer_is_lost_while_its_parts_arrive(daemon: bool) -> None:
    """The queue of the router holds more than a peer's patience with silence (4 s)."""
    settings: dict[str, Any] = {
        "megabytes": MEGABYTES,
        "rounds": 2,
        "joins": False,
        "round_s": 0.0,
        "congestion": "reno",
        "daemon": daemon,
    }
    with nodes(2, RATE_MBIT, RTT_MS, QUEUE_S) as on:
        results = on.run(bulk_rounds.run_peer, settings, 240.0)
    outcomes = [f["outcome"] for r in results for _, f in r["events"] if "outcome" in f]
    assert outcomes == ["averaged"] * 4, results
    assert [result["losses"] for result in results] == [0, 0]
