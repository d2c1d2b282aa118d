"""Signals and states of processes: an agent reaches the peers of its own runs only."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayhive.cluster.node.process_group import RECORD_SUFFIX, OwnedProcesses
from rayhive.cluster.node.runs import Runs
from rayhive.errors import ClusterError

RUN = "run"


@pytest.fixture
def group() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def runs_with(folder: Path, leader: int) -> Runs:
    owned = OwnedProcesses(leader=leader)
    owned.note()
    owned.save(folder / f"p0{RECORD_SUFFIX}")
    runs = Runs()
    runs[RUN] = folder
    return runs


def test_only_the_peers_own_processes_get_a_signal(
    tmp_path: Path, group: subprocess.Popen[bytes], stranger: subprocess.Popen[bytes]
) -> None:
    runs = runs_with(tmp_path, group.pid)
    both = [group.pid, stranger.pid]
    hit = runs.peer(RUN, group.pid).signal(signal.SIGKILL, both)
    assert hit == [group.pid]
    assert group.wait(5.0) == -signal.SIGKILL
    assert stranger.poll() is None
    states = runs.peer(RUN, group.pid).states(both)
    assert set(states.values()) == {"gone"}


def test_a_pid_that_was_given_to_somebody_else_is_left_alone(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    runs = runs_with(tmp_path, stranger.pid)
    record = tmp_path / f"p0{RECORD_SUFFIX}"
    data = json.loads(record.read_text())
    data["processes"][str(stranger.pid)] -= 1  # the peer's process was an earlier one
    record.write_text(json.dumps(data))
    owned = runs.peer(RUN, stranger.pid)
    assert owned.signal(signal.SIGKILL) == []
    assert owned.states() == {stranger.pid: "gone"}
    assert stranger.poll() is None


def test_a_leader_that_no_run_knows_is_refused(
    tmp_path: Path, group: subprocess.Popen[bytes], stranger: subprocess.Popen[bytes]
) -> None:
    runs = runs_with(tmp_path, group.pid)
    with pytest.raises(ClusterError, match=str(stranger.pid)):
        runs.peer(RUN, stranger.pid)
    with pytest.raises(ClusterError, match="another"):
        runs.peer("another", group.pid)


def test_a_run_that_was_cleared_is_looked_for_once(
    tmp_path: Path, group: subprocess.Popen[bytes]
) -> None:
    runs = runs_with(tmp_path, group.pid)
    with pytest.raises(ClusterError, match="not cleared"):
        asyncio.run(runs.remains(RUN))
    assert runs.remove(RUN) == tmp_path
    found = asyncio.run(runs.remains(RUN))
    assert f"process {group.pid} (sleep)" in found
    assert f"folder {tmp_path}" in found
    with pytest.raises(ClusterError, match="not cleared"):
        asyncio.run(runs.remains(RUN))
