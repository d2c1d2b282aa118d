"""Real averagers when a group grows, shrinks, loses a member or ends."""

from __future__ import annotations

from typing import Any

import pytest

from rayhive.compression.payload import payload
from tests.integration.averager_harness import SHAPES, run_scenario

pytestmark = pytest.mark.swarm


@pytest.fixture(scope="module")
def scenarios() -> dict[str, Any]:
    """All scenarios, in one process: most of their time is loading torch and hivemind."""
    return run_scenario("rounds_of_averagers", limit=240.0)


@pytest.fixture
def report(request: pytest.FixtureRequest, scenarios: dict[str, Any]) -> Any:
    """Report of the scenario after which a test is named."""
    report = scenarios[request.node.name.removeprefix("test_")]
    assert "failure" not in report, report["failure"]
    return report


def test_partial_round(report: Any) -> None:
    """A silent member is reported, and the round is not complete."""
    for result in report["rounds"]:
        assert result["group_size"] == 3
        # As a sender a peer loses what the mute one should have reduced, as a reducer a third.
        assert 0.4 < result["fraction"] < 0.7
        assert result["banned"] == [report["mute"]]
        assert len(result["failures"]) == 1
        assert report["mute"] in result["failures"][0]
        assert result["sent_bytes"] > result["received_bytes"]


def test_failed_round(report: Any) -> None:
    """A member that fails tells the others, whose timeouts would outlast the scenario."""
    failing = report.pop("failing")
    for how, results in report.items():
        for result in results:
            assert result["group_size"] == 3, how
            assert result["fraction"] < 1.0, how
            (failure,) = result["failures"]
            assert failing in failure, how


def test_departed_member(report: Any) -> None:
    """A member that left is awaited until its link ends; no timeout of the others ends in time."""
    leaving = report.pop("leaving")
    assert all(result["group_size"] == 3 for results in report.values() for result in results)
    for result in report.pop("finishes"):
        assert (result["fraction"], result["banned"], result["failures"]) == (1.0, [], [])
    for how, results in report.items():
        for result in results:
            assert result["banned"] == [leaving], how
            assert result["fraction"] < 1.0, how


def test_retried_round(report: Any) -> None:
    """The cost of a failed attempt is reported with the next result, and only once."""
    one = payload(SHAPES, powersgd_rank=2, min_compression_ratio=0.3).bytes_per_transfer
    first, second = report
    for result in first:
        assert (result["attempts"], result["fraction"], result["sent_bytes"]) == (2, 1.0, one)
        # A peer that fails as soon as its own tensors are averaged does not wait until it has
        # answered the other, whose last parts may stay without an answer. They are of phase Q:
        # the other began it with all answers of phase P.
        phase_p, _ = result["phases"]
        assert phase_p["sent_bytes"] < result["wasted_bytes"] <= one
    for result in second:
        assert (result["attempts"], result["wasted_bytes"]) == (1, 0)


def test_growing_group(report: Any) -> None:
    """Rounds begin when all members are there: the window would outlast the scenario."""
    before, after = report
    assert [result["group_size"] for result in before] == [2, 2]
    assert [result["group_size"] for result in after] == [3, 3, 3]
    assert all(result["fraction"] == 1.0 for result in (*before, *after))


def test_shrinking_group(report: Any) -> None:
    """A group that waits for a lost peer begins when that peer is given up."""
    assert report["too_early"] == [False, False]
    assert report["sizes"] == [2, 2]
    assert report["alone"] == "NoOtherPeers"


def test_state_averaging(report: Any) -> None:
    """Rounds are measured, downloads are whole and leave no copy, dead averagers are harmless."""
    for result in report["rounds"]:
        assert result["group_size"] == 2
        assert result["fraction"] == 1.0
    assert report["loaded"]
    assert report["freed"] and all(report["freed"])
    assert report["alive"] == [False, False]


def test_shutdown_while_searching(report: Any) -> None:
    """hivemind leaves the search running; its messages crash the DHT, whose p2pd stays behind."""
    assert report == {"ended": "cancelled", "exit codes": [0, 0]}


def test_plain_peer(report: Any) -> None:
    """A peer that runs hivemind's own class finds ours and averages with it."""
    assert report["sizes"] == [2, 2]
    assert report["error"] < 1e-6
    assert report["ours"]["fraction"] == 1.0
