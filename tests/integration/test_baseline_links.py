"""Studies on shaped links: a round of a baseline lasts at least as long as its bytes need.

A swarm's peers need less, because links carry bodies in lossless coding.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayhive.events import Round
from rayhive.metrics.logs import last_timeline
from rayhive.report.results import load_results
from tests.integration.testbed_helpers import needs_testbed

#: Two rates [Mbit/s] at which a round of the model of digits needs 0.1 s and 2.4 s.
FAST, SLOW = 50.0, 2.0
#: Samples of a round: hivemind's peers, which begin alone, have to see each other in its time.
ROUND = 16_384
#: Share of the time that the bytes need which a round takes at least: queues hold some bytes.
SHARE = 0.8


def run_at(
    rate_mbit: float, folder: Path, baselines: list[str], budget: dict[str, Any]
) -> dict[str | None, dict[str, Any]]:
    """Run a study with baselines on links of a rate; return its rows by baseline."""
    study = {
        "name": "links",
        "workload": {"name": "digits"},
        "swarm": {
            "peers": 2,
            "target_batch_size": ROUND,
            "batch_size": 32,
            "node_classes": {"home": {"count": 2, "link": {"rate_mbit": rate_mbit}}},
        },
        "baselines": baselines,
        "enqueue": [{"codec": "none"}],
        "replicates": 1,
        "budget": {"trials": 1, "seconds_per_replicate": 30, **budget},
    }
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(study))
    command = [sys.executable, "-m", "rayhive", "sweep", str(path), "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {row["baseline"]: dict(row) for row in load_results(folder).folded}


@needs_testbed
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_rounds_of_baselines_last_as_long_as_the_link_needs(
    isolated_env: Path, tmp_path: Path
) -> None:
    short, folder = {"samples_per_replicate": 4 * ROUND}, tmp_path / "slow"
    fast = run_at(FAST, tmp_path / "fast", ["ddp"], short)
    slow = run_at(SLOW, folder, ["ddp", "hivemind"], {})
    ddp = {FAST: fast["ddp"], SLOW: slow["ddp"]}
    size = ddp[SLOW]["payload_bytes_per_round"]
    assert size == ddp[FAST]["payload_bytes_per_round"] > 500_000
    needed = {rate: 8e-6 * size / rate for rate in ddp}  # [s]
    for rate, row in ddp.items():
        assert row["n"] == 1 and row["wire_bytes_per_round"] > size
        assert row["round_p50_s"] > SHARE * needed[rate]
    assert ddp[SLOW]["round_p50_s"] > ddp[FAST]["round_p50_s"]

    swarm = slow[None]
    assert swarm["payload_bytes_per_round"] == size
    assert swarm["wire_bytes_per_round"] < 0.95 * size, "with headers, heartbeats and downloads"

    # hivemind's peers send as much in a round as DDP's, and more for the parameters
    timeline = last_timeline(folder / "trials" / "hivemind" / "r0-none")
    averaged = [event for event in timeline.of(Round) if event.group_size == 2]
    assert averaged
    assert all((event.waited_s or 0.0) > SHARE * needed[SLOW] for event in averaged)
