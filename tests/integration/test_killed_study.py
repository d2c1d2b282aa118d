"""The benchmark of a killed study, on a few replicates: drivers, a supervisor and an agent die."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.claims import parse_claims
from benchmarks.killed_study import STUDY
from rayhive.cluster.testbed import privilege
from tests.integration.cluster_harness import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.skipif(privilege.lacking() is not None, reason=f"testbed: {privilege.lacking()}")
def test_a_killed_study_covers_what_the_uninterrupted_one_does(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "killed_study.py"), str(STUDY)]
    command += ["--configurations", "2", "--replicates", "2", "--kills", "4", "--seed", "1"]
    command += ["--set", "swarm.peers=2", "--set", "swarm.node_classes.spot.count=2"]
    command += ["--set", "baselines=[]", "--set", "retries=10", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    (claim,) = parse_claims(done.stdout.splitlines())
    assert claim.held and done.returncode == 0, done.stdout + done.stderr
    kills = json.loads((tmp_path / "killed.kills.json").read_text())
    assert sorted(kill["target"] for kill in kills) == ["agent", "driver", "driver", "supervisor"]
