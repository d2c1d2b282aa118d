"""Bytes that real peers send, held against the prediction: equal, not close.

The payload of a round is what :func:`rayhive.compression.payload.payload` says, and the peers
together send it 2(N - 1) times (arXiv 1905.13727 counts one direction of one copy).
"""

from __future__ import annotations

from typing import Any

import pytest

from rayhive.compression.payload import allreduce_bytes, payload
from rayhive.registry import CODECS
from tests.integration.averager_harness import SHAPES, run_scenario

pytestmark = pytest.mark.swarm

LOW = ("blockwise4", "blockwise2", "sign", "topk")
FIXED = ("none", "float16", "scaled_float16", "uniform8", "quantile8", *LOW)
CASES: list[dict[str, Any]] = [
    *({"codec": codec, "error_feedback": codec in LOW} for codec in FIXED),
    {"codec": "size_adaptive", "threshold": 500},
    *({"codec": "none", "powersgd_rank": rank, "min_compression_ratio": 0.3} for rank in (1, 2, 4)),
    {"codec": "float16", "powersgd_rank": 2, "min_compression_ratio": 0.85},
    {
        "codec": "size_adaptive",
        "threshold": 100,
        "powersgd_rank": 2,
        "min_compression_ratio": 0.0,
    },
    {"codec": "scaled_float16", "powersgd_rank": 4, "min_compression_ratio": 0.99},
    {"codec": "uniform8", "error_feedback": True},
    {
        "codec": "topk",
        "top_k": 200,
        "powersgd_rank": 4,
        "min_compression_ratio": 0.3,
        "error_feedback": True,
    },
    {
        "codec": "uniform8",
        "powersgd_rank": 2,
        "min_compression_ratio": 0.3,
        "error_feedback": True,
    },
]
NAMES = ["-".join(str(value) for value in case.values()) for case in CASES]


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=pytest.mark.slow)],
    ids=["2 peers", "4 peers"],
)
def swarm(request: pytest.FixtureRequest) -> tuple[int, list[dict[str, Any]]]:
    peers = request.param
    return peers, run_scenario("bytes_of_rounds", peers=peers, cases=CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_measured_bytes_are_the_predicted_bytes(
    swarm: tuple[int, list[dict[str, Any]]], index: int
) -> None:
    peers, reports = swarm
    case, seen = CASES[index], reports[index]
    options = {name: value for name, value in case.items() if name != "error_feedback"}
    predicted = payload(SHAPES, peers=peers, **options)
    assert predicted.exact
    assert seen["compressed"] == list(predicted.compressed)
    for results in seen["rounds"]:
        sent = sum(result["sent_bytes"] for result in results)
        assert sent == 2 * (peers - 1) * predicted.bytes_per_transfer
        assert sent == peers * allreduce_bytes(predicted.bytes_per_transfer, peers)
        assert sent == sum(result["received_bytes"] for result in results)
        for result in results:
            assert [phase["name"] for phase in result["phases"]] == [
                phase.name for phase in predicted.phases
            ]
        for at, phase in enumerate(predicted.phases):
            measured = sum(result["phases"][at]["sent_bytes"] for result in results)
            assert measured == 2 * (peers - 1) * phase.bytes


@pytest.mark.parametrize("index", range(len(CASES)), ids=NAMES)
def test_rounds_are_complete(swarm: tuple[int, list[dict[str, Any]]], index: int) -> None:
    peers, reports = swarm
    for result in (result for results in reports[index]["rounds"] for result in results):
        assert result["group_size"] == peers
        assert result["fraction"] == 1.0
        assert result["counts_complete"]
        assert result["attempts"] == 1
        assert not result["banned"]
        assert not result["wasted_bytes"]
        assert result["matchmaking_s"] >= 0 and result["allreduce_s"] > 0


@pytest.mark.parametrize("index", range(len(FIXED)), ids=FIXED)
def test_the_average_is_the_average(swarm: tuple[int, list[dict[str, Any]]], index: int) -> None:
    """Encoded twice, on the way to the reducer and back as a difference, for every peer."""
    _, reports = swarm
    bound = 4 * CODECS.get(CASES[index]["codec"]).relative_error + 1e-6
    assert reports[index]["error"] <= bound


def test_peers_agree_bit_for_bit_under_powersgd(
    swarm: tuple[int, list[dict[str, Any]]],
) -> None:
    """Factorised gradients are products of the same factors; the rest differs by rounding."""
    _, reports = swarm
    for case, seen in zip(CASES, reports, strict=True):
        if case["codec"] == "none":
            assert seen["spread"] < 1e-5
