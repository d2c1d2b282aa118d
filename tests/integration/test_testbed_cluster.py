"""A whole testbed: Ray on shaped nodes, which agents and supervisors change from inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rayhive.cluster.testbed import Testbed
from tests.integration.testbed_helpers import config, needs_testbed, remains

ROOT = Path(__file__).resolve().parents[2]


@needs_testbed
@pytest.mark.slow
@pytest.mark.cluster
def test_a_cluster_of_shaped_nodes(isolated_env: Path) -> None:
    with Testbed(config({"rate_mbit": 20, "delay_ms": 5}, {"rate_mbit": 20})) as testbed:
        number, first, second = testbed.state.number, *testbed.nodes
        script = ["-m", "tests.integration.testbed_driver", testbed.address]
        env = {**os.environ, **testbed.variables, "RAY_AUTH_MODE": "token"}
        env["PYTHONPATH"] = str(ROOT)
        done = subprocess.run(
            [sys.executable, *script, str(testbed.state.folder)],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=200,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        told = [(key, value) for line in lines for key, value in json.loads(line).items()]
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert remains(number) == []
    measured = told.pop(3)[1]
    assert measured["rate_up_mbit"] == pytest.approx(3, rel=0.1)
    assert measured["rate_down_mbit"] == pytest.approx(3, rel=0.1)
    assert measured["rtt_ms"] == pytest.approx(60, rel=0.1)
    killed = dict(told)["killed"]
    assert killed >= 2  # the raylet and the agent's worker at least
    assert told == [
        ("nodes", ["0", "1"]),
        ("addresses", [first.data_address, second.data_address]),
        ("before", {"rate_mbit": 20, "delay_ms": 5, "loss": 0}),
        ("cut", {"sent": 10, "out": 0, "in": 0}),
        ("mended", {"sent": 10, "out": 10, "in": 10}),
        ("killed", killed),
        ("nodes", ["0"]),
        ("nodes", ["0", "1"]),
        ("addresses", [second.data_address]),
    ]
