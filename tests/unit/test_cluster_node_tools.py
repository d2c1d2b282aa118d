"""What an agent does to processes: to those of its own peers, and to nobody else's."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayhive.cluster.node.process_faults import NodeTools
from rayhive.cluster.node.process_group import RECORD_SUFFIX, OwnedProcesses
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


def tools_for(folder: Path, leader: int) -> NodeTools:
    owned = OwnedProcesses(leader=leader)
    owned.note()
    owned.save(folder / f"p0{RECORD_SUFFIX}")
    tools = NodeTools()
    tools._runs = {RUN: folder}
    return tools


def test_only_the_peers_own_processes_get_a_signal(
    tmp_path: Path, group: subprocess.Popen[bytes], stranger: subprocess.Popen[bytes]
) -> None:
    tools = tools_for(tmp_path, group.pid)
    both = [group.pid, stranger.pid]
    hit = asyncio.run(tools.signal_processes(RUN, group.pid, signal.SIGKILL, both))
    assert hit == [group.pid]
    assert group.wait(5.0) == -signal.SIGKILL
    assert stranger.poll() is None
    states = asyncio.run(tools.process_states(RUN, group.pid, both))
    assert set(states.values()) == {"gone"}


def test_a_pid_that_was_given_to_somebody_else_is_left_alone(
    tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    tools = tools_for(tmp_path, stranger.pid)
    record = tmp_path / f"p0{RECORD_SUFFIX}"
    data = json.loads(record.read_text())
    data["processes"][str(stranger.pid)] -= 1  # the peer's process was an earlier one
    record.write_text(json.dumps(data))
    assert asyncio.run(tools.signal_processes(RUN, stranger.pid, signal.SIGKILL)) == []
    assert asyncio.run(tools.process_states(RUN, stranger.pid)) == {stranger.pid: "gone"}
    assert stranger.poll() is None


def test_a_leader_that_no_run_knows_is_refused(
    tmp_path: Path, group: subprocess.Popen[bytes], stranger: subprocess.Popen[bytes]
) -> None:
    tools = tools_for(tmp_path, group.pid)
    with pytest.raises(ClusterError, match=str(stranger.pid)):
        asyncio.run(tools.signal_processes(RUN, stranger.pid, signal.SIGKILL))
    with pytest.raises(ClusterError, match="another"):
        asyncio.run(tools.process_states("another", group.pid))


def test_a_run_that_was_cleared_is_looked_for_once(
    tmp_path: Path, group: subprocess.Popen[bytes]
) -> None:
    tools = tools_for(tmp_path, group.pid)
    with pytest.raises(ClusterError, match="not cleared"):
        asyncio.run(tools.orphans(RUN))
    tools.release_tools(RUN)
    tools._runs.clear()
    found = asyncio.run(tools.orphans(RUN))
    assert f"process {group.pid} (sleep)" in found
    assert f"folder {tmp_path}" in found
    with pytest.raises(ClusterError, match="not cleared"):
        asyncio.run(tools.orphans(RUN))
