"""All remains of a cleared run are found, and nothing of other runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayhive.cluster.node import capabilities, process_group, runs
from rayhive.cluster.node.cgroups import CpuLimit
from rayhive.cluster.node.process_group import RECORD_SUFFIX, OwnedProcesses
from rayhive.cluster.node.runs import Marks, tag
from rayhive.cluster.node.tools.small_disk import SmallDisk
from tests.unit.fault_fakes import my_groups

#: A run of this process: control groups are found by their run, and others may be testing, too.
RUN = f"study-t0-r0-kill-a{os.getpid()}"


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def marked(folder: Path, leader: int) -> Marks:
    (folder / "run" / "p1").mkdir(parents=True)
    owned = OwnedProcesses(leader=leader, folder=str(folder / "run" / "p1"))
    owned.note()
    owned.sockets = {str(folder / "hivemind-1.sock")}
    owned.save(folder / "run" / f"p1{RECORD_SUFFIX}")
    marks = Marks.record(RUN, folder / "run")
    for path in (folder / "run" / "p1", folder / "run"):
        for file in path.glob("*.json"):
            file.unlink()
        path.rmdir()
    return marks


def test_nothing_is_found_where_nothing_is_left(
    tmp_path: Path, peer: subprocess.Popen[bytes]
) -> None:
    marks = marked(tmp_path, peer.pid)
    peer.kill()
    peer.wait()
    (tmp_path / "hivemind-2.sock").touch()
    stranger = subprocess.Popen(["sleep", "300"], env={"TMPDIR": f"{tmp_path}/running/p1"})
    try:
        assert marks.find() == []
    finally:
        stranger.kill()
        stranger.wait()


def test_processes_are_found_also_if_they_left_the_peers_session(
    tmp_path: Path, peer: subprocess.Popen[bytes]
) -> None:
    marks = marked(tmp_path, peer.pid)
    away = subprocess.Popen(
        ["sleep", "300"], env={"TMPDIR": f"{tmp_path}/run/p1"}, start_new_session=True
    )
    try:
        assert marks.find() == sorted(
            [f"process {peer.pid} (sleep)", f"process {away.pid} (sleep)"]
        )
    finally:
        away.kill()
        away.wait()


def test_files_are_found(
    tmp_path: Path, peer: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHARED_MEMORY", "SOCKETS"):
        monkeypatch.setattr(process_group, name, tmp_path)
    monkeypatch.setattr(runs, "NAMESPACES", tmp_path / "netns")
    marks = marked(tmp_path, peer.pid)
    peer.kill()
    peer.wait()
    names = tag(RUN)
    left = {
        tmp_path / "hivemind-1.sock": "socket",
        tmp_path / f"hivemind-{peer.pid}-abc.sock": "socket",
        tmp_path / f"torch_{peer.pid}_1": "shared memory",
        tmp_path / f"sem.loky-{peer.pid}-1": "shared memory",
    }
    for path in [*left, tmp_path / "torch_1_1", tmp_path / f"hivemind-{peer.pid + 1}-abc.sock"]:
        path.touch()
    (tmp_path / "netns").mkdir()
    (tmp_path / "netns" / f"rayhive-{names}-0").touch()
    (tmp_path / "netns" / "rayhive-other").touch()
    (tmp_path / "run").mkdir()
    assert marks.find() == sorted(
        [
            *(f"{what} {path}" for path, what in left.items()),
            f"network namespace rayhive-{names}-0",
            f"folder {tmp_path}/run",
        ]
    )


@pytest.mark.skipif(capabilities.here()["mount"] is not None, reason="can't mount")
def test_mounts_are_found(tmp_path: Path, peer: subprocess.Popen[bytes]) -> None:
    marks = marked(tmp_path, os.getpid())
    (tmp_path / "run").mkdir()
    disk = SmallDisk(tmp_path / "run" / "disk", 2**20)
    assert f"mount {tmp_path}/run/disk" in marks.find()
    disk.release()
    assert f"mount {tmp_path}/run/disk" not in marks.find()


@pytest.mark.skipif(capabilities.here()["cpu_quota"] is not None, reason="no control groups")
def test_control_groups_are_found(tmp_path: Path, peer: subprocess.Popen[bytes]) -> None:
    marks = marked(tmp_path, peer.pid)
    theirs = CpuLimit(f"{tag('another')}-{peer.pid}", 0.5)
    limit = CpuLimit(f"{tag(RUN)}-{peer.pid}", 0.5)
    assert f"control group {limit.folder}" in marks.find()
    assert f"control group {theirs.folder}" not in marks.find()
    limit.release()
    theirs.release()
    assert my_groups() == []
