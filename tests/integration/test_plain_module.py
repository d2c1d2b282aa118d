"""A plain ``LightningModule`` in a swarm: disjoint data, evaluations, a scheduler made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayhive.spec import WorkloadConfig
from tests.integration.forkserver_harness import digits_peers, finish_swarm, forkserver, start_swarm

MODEL = "lightning.pytorch.demos.boring_classes:BoringModel"


@pytest.mark.swarm
@pytest.mark.slow
def test_lightnings_boring_model_trains_in_a_swarm(tmp_path: Path) -> None:
    specs = [
        spec.model_copy(update={"workload": WorkloadConfig(import_path=MODEL)})
        for spec in digits_peers(
            "boring",
            2,
            swarm={"target_batch_size": 16, "batch_size": 4},
            configuration={"delay": "optimizer"},  # its scheduler is made again
            evaluate_every=32,
            seconds=60,
            samples=96,
        )
    ]
    with forkserver() as path:
        lines = start_swarm(path, specs, tmp_path)
        finish_swarm(lines)
    for line in lines:
        assert line.of("peer_finished")[0]["reason"] == "rounds"
        assert line.of("peer_ready")[0].get("target") is None
        assert line.of("peer_ready")[0]["data"] == "own"
        values = [event["values"] for event in line.of("evaluation")]
        assert all(set(each) == {"loss", "x"} for each in values)
        assert values[-1]["x"] < values[0]["x"]
