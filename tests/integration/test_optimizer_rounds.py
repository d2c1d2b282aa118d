"""A peer whose gradients are not averaged applies its own, once, and never zeros."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.swarm]

# a round has 5 samples of gradient 0, 1 of 1 and 6 of 2 (then of 10, 11, 12): their mean is applied
MEAN = (5 * 0 + 1 * 1 + 6 * 2) / 12
OWN_MEANS = [-MEAN, -MEAN - (10 + MEAN)]


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


@pytest.mark.parametrize(
    ("delay", "reuse"),
    [
        ("none", False),
        pytest.param("none", True, marks=pytest.mark.slow),
        pytest.param("optimizer", False, marks=pytest.mark.slow),
        pytest.param("gradients", True, marks=pytest.mark.slow),
    ],
)
def test_a_failed_round_applies_the_peers_own_gradients(delay: str, reuse: bool) -> None:
    result = run(delay=delay, reuse=reuse, company=True, on_failure="local")
    assert result["outcomes"] == ["local", "local"]
    assert result["samples"] == [12, 12]
    assert result["choices"] == ["local", "local"]
    assert result["weights"] == pytest.approx(OWN_MEANS)


@pytest.mark.slow
@pytest.mark.parametrize("delay", ["none", "gradients"])
def test_a_failed_round_is_skipped_when_asked(delay: str) -> None:
    result = run(delay=delay, reuse=False, company=True, on_failure="skip")
    assert result["outcomes"] == ["skipped", "skipped"]
    assert result["weights"] == [0.0, 0.0]


@pytest.mark.parametrize(("delay", "reuse"), [("none", True), ("gradients", False)])
@pytest.mark.slow
def test_a_peer_alone_applies_all_that_it_accumulated(delay: str, reuse: bool) -> None:
    result = run(delay=delay, reuse=reuse, company=False, on_failure="local")
    assert result["outcomes"] == ["alone", "alone"]
    assert result["weights"] == pytest.approx(OWN_MEANS)
