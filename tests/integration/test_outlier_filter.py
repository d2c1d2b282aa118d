"""Real peers whose data differ: none of them is refused, whatever the rule makes of gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayhive.averaging.outlier_filter import LEANING
from rayhive.spec import WorkloadConfig
from rayhive.spec.replicate import PeerSpec
from tests.integration.forkserver_harness import (
    PeerLine,
    digits_peers,
    finish_swarm,
    start_swarm,
)

pytestmark = [pytest.mark.swarm]

PEERS, TARGET = 3, 96
SKEWED = WorkloadConfig(import_path="tests.integration.skewed_digits:SkewedDigits")


def run(
    socket_path: str, folder: Path, name: str, rounds: int, **rules: Any
) -> tuple[list[PeerLine], list[PeerSpec]]:
    """Train two peers with the classes 0-4 and one with 5-9."""
    specs = [
        spec.model_copy(update={"workload": SKEWED})
        for spec in digits_peers(
            name,
            PEERS,
            swarm={"target_batch_size": TARGET, "batch_size": 32, **rules},
            configuration={},
            evaluate_every=1000 * TARGET,
            seconds=200,
            samples=rounds * TARGET,
        )
    ]
    lines = start_swarm(socket_path, specs, folder)
    finish_swarm(lines, 240)
    return lines, specs


@pytest.mark.slow
def test_an_honest_peer_whose_data_differ_is_not_refused(socket_path: str, tmp_path: Path) -> None:
    # the direction rule refused it from the round after LEANING on
    lines, _ = run(socket_path, tmp_path, "skewed", LEANING + 9)
    for line in lines:
        assert line.of("rejected") == [], line.story()
        assert {e["outcome"] for e in line.of("round")} == {"averaged"}, line.story()
        assert min(e["samples"] for e in line.of("round")) > 0
        assert not any(e["excluded"] for e in line.of("round"))
    assert lines[2].of("evaluation")[-1]["values"]["rare"] > 0.3, "5-9 are learned, too"


@pytest.mark.parametrize("aggregation", ["trimmed_mean", "centered_clipping"])
def test_a_robust_aggregation_gives_all_replicas_the_same_parameters(
    socket_path: str, tmp_path: Path, aggregation: str
) -> None:
    lines, _ = run(socket_path, tmp_path, aggregation[:7], 5, aggregation=aggregation)
    told = [{e["round"]: e for e in line.of("weights")} for line in lines]
    common = set.intersection(*(set(each) for each in told))
    assert len(common) >= 4
    for round_ in common:
        first, *others = (each[round_] for each in told)
        assert max(first.distance(other) for other in others) <= 1e-5
    for line in lines:
        assert {e["outcome"] for e in line.of("round")} == {"averaged"}, line.story()
