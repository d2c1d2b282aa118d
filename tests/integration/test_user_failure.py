"""A failure in the user's code, on real peers of a sweep by the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

MODULE = """
from rayhive.workloads.digits import Digits


def broken(batch):
    raise ValueError("no label in this batch")


class Mine(Digits):
    def module(self, seed):
        module = super().module(seed)
        module.training_step = broken
        return module
"""
STUDY = {
    "name": "failing",
    "workload": {"import": "mine_that_fails:Mine"},
    "swarm": {"peers": 2, "target_batch_size": 128},
    "space": {"codec": ["none", "float16", "uniform8"], "delay": ["none", "state"]},
    "replicates": 1,
    "budget": {"trials": 6, "seconds_per_replicate": 30},
}


@pytest.mark.slow
@pytest.mark.swarm
@pytest.mark.cluster
def test_a_failure_names_its_line_and_ends_the_sweep(tmp_path: Path, isolated_env: Path) -> None:
    (tmp_path / "mine_that_fails.py").write_text(MODULE)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    done = subprocess.run(
        [sys.executable, "-m", "rayhive", "sweep", "study.yaml", "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    assert "the first 3 replicates" in done.stderr
    assert "ValueError('no label in this batch')" in done.stderr
    assert re.search(r"mine_that_fails\.py, line 6, in broken", done.stderr), done.stderr
    folders = sorted((tmp_path / "run" / "trials").glob("*/r0-none"))
    logs = [folder for folder in folders if (folder / "events.jsonl").exists()]
    assert len(logs) == 3  # of 6
    for folder in logs:
        texts = [log.read_text() for log in (folder / "logs").glob("peer-*.log")]
        assert any("Traceback" in text and "no label in this batch" in text for text in texts)
        assert any('mine_that_fails.py", line 6, in broken' in text for text in texts)
