"""``status`` and ``stop`` of sweeps on clusters of their own: an embedded Ray, or a testbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhive.cluster import control, own_runs
from rayhive.cluster.node import process_group
from rayhive.cluster.node.processes import started
from rayhive.cluster.testbed import state
from tests.fixtures.logs import Log, make_spec


@pytest.fixture
def driver() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that ends at SIGTERM."""
    code = "import sys; print('runs', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture(params=["embedded", "testbed"])
def place(
    request: Any, driver: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return the private folder of a driver's cluster."""
    folder = tmp_path / "private"
    folder.mkdir()
    found = {"embedded": [(folder, driver.pid)], "testbed": []}
    monkeypatch.setattr(process_group, "owned", lambda base: found["embedded"])
    if request.param == "testbed":
        found = {"embedded": [], "testbed": [(folder, driver.pid)]}
    monkeypatch.setattr(state, "owned", lambda: found["testbed"])
    return folder


def written(tmp_path: Path, replicate: int, ended: bool) -> Any:
    """Return the spec of a replicate whose events are on disk."""
    spec = make_spec(study="tiny", replicate=replicate, folder=str(tmp_path / f"r{replicate}"))
    folder = Log(spec, state="completed" if ended else None).write(tmp_path)
    spec = spec.model_copy(update={"folder": str(folder)})
    (folder / "spec.json").write_text(spec.model_dump_json(by_alias=True))
    return spec


def test_a_further_attempt_is_told_once(
    place: Path, tmp_path: Path, driver: subprocess.Popen[bytes]
) -> None:
    assert control.cluster_status() == []
    done, runs = written(tmp_path, 0, ended=True), written(tmp_path, 1, ended=False)
    for spec in (done, runs, runs):
        own_runs.note(place, spec)
    with (place / "runs").open("a") as file:
        file.write('{"study": "ti')  # the driver writes
    (status,) = control.cluster_status()
    assert (status.run_id, status.outcome) == (runs.run_id, None)


def test_a_driver_is_stopped_also_between_two_replicates(
    place: Path, tmp_path: Path, driver: subprocess.Popen[bytes]
) -> None:
    own_runs.note(place, written(tmp_path, 0, ended=True))
    assert control.stop_study(None, "other") == []
    assert driver.poll() is None
    assert control.stop_study(None, "tiny") == [
        f"the sweep (pid {driver.pid}) between two replicates"
    ]
    assert driver.wait(10) == -signal.SIGTERM


def test_a_testbed_has_an_owner_while_that_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "testbeds", lambda: iter(made))
    pid = os.getpid()
    own = started(pid)
    assert own is not None
    owners = [(pid, own), (pid, own - 1), None]
    made = [
        state.TestbedState(number=number, name="n", mtu=1500, nodes=(), owner=owner)
        for number, owner in enumerate(owners)
    ]
    assert state.owned() == [(made[0].folder, pid)]
