"""An embedded Ray and everything on it end with the driver, however that ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster_harness import (
    FAKE_FORKSERVER,
    driver,
    events_of,
    eventually,
    groups,
    litter,
    replicate,
    training,
    users_of,
)

pytestmark = [pytest.mark.cluster]

DRIVER = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # coverage takes it, and then the cluster may not
import json, sys
from rayhive.cluster.cluster import Cluster
from rayhive.spec.replicate import ReplicateSpec
spec, forkserver = ReplicateSpec.model_validate_json(sys.argv[1]), json.loads(sys.argv[2])
with Cluster.connect(None, forkserver_command=forkserver) as cluster:
    assert cluster.embedded
    handle = cluster.start(spec)
    print("started", flush=True)
    try:
        handle.wait(120)
    finally:
        print("aborted in", signal.getitimer(signal.ITIMER_REAL)[0], flush=True)
"""

CONTROL = """
import json, sys
from dataclasses import asdict
from rayhive.cluster.control import cluster_status, stop_study
print("answer", json.dumps([asdict(found) for found in cluster_status()]), flush=True)
print("stopped", json.dumps(stop_study(None, sys.argv[1])), flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a private folder in place of /tmp, which no process may use in the end."""
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    yield path
    assert users_of(path) == []
    left = sorted(item.name for item in path.iterdir())
    shutil.rmtree(path)
    assert left == []


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),  # and see the test below
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_nothing_survives_the_driver(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    spec = replicate(tmp_path, rounds=None, budget={"seconds_per_replicate": 120})
    arguments = (spec.model_dump_json(by_alias=True), json.dumps(FAKE_FORKSERVER))
    with driver(DRIVER, *arguments, RAY_TMPDIR=str(folder)) as running:
        running.line("started")
        eventually(lambda: training(spec), 30.0)
        assert len(users_of(folder)) > 3 and len(litter(spec)) == 4
        # as a terminal does it: the whole group, Ray's daemons among it
        (os.killpg if number == signal.SIGINT else os.kill)(running.process.pid, number)
        running.process.wait(30)
        # A driver that is asked to end does so when all is gone; after a SIGKILL the kernel ends
        # Ray and the undertaker clears up.
        if number != signal.SIGKILL:
            assert groups(spec) == [] and litter(spec) == [] and users_of(folder) == []
            assert events_of(spec)[-1]["kind"] == "replicate_finished"
        eventually(lambda: groups(spec) == [] and litter(spec) == [], 20.0)
        eventually(lambda: users_of(folder) == [] and list(folder.iterdir()) == [], 20.0)


@pytest.mark.slow
def test_an_embedded_run_is_seen_and_stopped_from_another_terminal(
    folder: Path, tmp_path: Path
) -> None:
    spec = replicate(tmp_path, study="seen", rounds=None, budget={"seconds_per_replicate": 120})
    arguments = (spec.model_dump_json(by_alias=True), json.dumps(FAKE_FORKSERVER))
    with driver(DRIVER, *arguments, RAY_TMPDIR=str(folder)) as running:
        running.line("started")
        eventually(lambda: training(spec), 30.0)
        with driver(CONTROL, "seen", RAY_TMPDIR=str(folder)) as control:
            (status,) = json.loads(control.line("answer"))
            assert (status["run_id"], status["phase"]) == (spec.run_id, "training")
            assert status["peers"]["peer-0"]["round"] > 0
            assert json.loads(control.line("stopped")) == [spec.run_id]
        # Ray's own handler of SIGTERM would leave three seconds for all of this
        assert float(running.line("aborted in")) == 0.0
        assert running.process.wait(1) != 0
    assert groups(spec) == [] and litter(spec) == []
    assert events_of(spec)[-1]["stop_reason"] == "the driver closed its cluster"
