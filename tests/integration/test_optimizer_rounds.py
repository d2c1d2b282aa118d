"""What a peer applies when its gradients are not averaged: its own, once, and never zeros."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.swarm]

# the gradients of a round are 0, 1, 2 (then 10, 11, 12); their mean, 1 (then 11), is subtracted
OWN_MEANS = [-1.0, -12.0]


def run(**settings: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.optimizer_scenario", json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("delay", ["none", "optimizer", "gradients"])
def test_a_failed_round_applies_the_peers_own_gradients(delay: str) -> None:
    result = run(delay=delay, company=True, on_failure="local")
    assert result["outcomes"] == ["local", "local"]
    assert result["samples"] == [12, 12]
    assert result["choices"] == ["local", "local"]
    assert result["weights"] == pytest.approx(OWN_MEANS)


@pytest.mark.parametrize("delay", ["none", "gradients"])
def test_a_failed_round_is_skipped_when_asked(delay: str) -> None:
    result = run(delay=delay, company=True, on_failure="skip")
    assert result["outcomes"] == ["skipped", "skipped"]
    assert result["weights"] == [0.0, 0.0]


@pytest.mark.parametrize("delay", ["none", "gradients"])
def test_a_peer_alone_applies_all_that_it_accumulated(delay: str) -> None:
    result = run(delay=delay, company=False, on_failure="local")
    assert result["outcomes"] == ["alone", "alone"]
    assert result["weights"] == pytest.approx(OWN_MEANS)
