"""``status`` and ``stop`` of sweeps on clusters of their own: an embedded Ray, or a testbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
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


def test_a_pid_that_is_reused_while_events_are_read_gets_no_signal(
    place: Path, tmp_path: Path, driver: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_runs.note(place, written(tmp_path, 0, ended=False))
    (found,) = own_runs.drivers()
    assert (found.pid, found.started) == (driver.pid, started(driver.pid))
    earlier = replace(found, started=found.started - 1)
    monkeypatch.setattr(own_runs, "drivers", lambda: iter([earlier]))
    control.stop_study(None, "tiny")
    assert driver.poll() is None


def test_all_drivers_of_a_study_are_stopped_before_the_first_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After its signal the first one reads until the second one, the only writer, has ended."""
    code = """if True:
        import os, signal
        signal.signal(signal.SIGTERM, lambda *_: os._exit(len(os.read(0, 1))))
        print(flush=True)
        signal.pause()
    """
    reads, writes = os.pipe()
    first = subprocess.Popen([sys.executable, "-c", code], stdin=reads, stdout=subprocess.PIPE)
    second = subprocess.Popen(["sleep", "300"], stdout=writes)
    for end in (reads, writes):
        os.close(end)
    try:
        assert first.stdout is not None and first.stdout.readline()
        starts = [(process.pid, started(process.pid) or 0) for process in (first, second)]
        both = [own_runs.Driver(pid, start, "tiny", ()) for pid, start in starts]
        monkeypatch.setattr(own_runs, "drivers", lambda: iter(both))
        monkeypatch.setattr(control, "_STOP_TIMEOUT", 10.0)
        assert len(control.stop_study(None, "tiny")) == 2
        assert (first.wait(1), second.wait(1)) == (0, -signal.SIGTERM)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


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
