"""The remains of dead process groups are removed, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayhive.cluster.node import capabilities, process_group
from rayhive.cluster.node.process_group import OwnedProcesses
from rayhive.cluster.node.processes import start_reaper, started
from rayhive.cluster.node.tools.small_disk import SmallDisk
from tests.integration.cluster_harness import eventually

GROUP = """
import os, socket, sys, time
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1] + "/hivemind-x.sock"); s.listen()
t = socket.socket(socket.AF_UNIX); t.bind(sys.argv[1] + "/other.sock"); t.listen()
told, tell = os.pipe()
child = os.fork()
open(f"/dev/shm/torch_{os.getpid()}_7_0", "wb").close()
if child == 0:
    os.write(tell, b"x")
    time.sleep(600)
os.read(told, 1)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", GROUP, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def dead(pids: list[int]) -> bool:
    deadline = time.monotonic() + 5
    while any(started(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(started(pid) for pid in pids)


def memory_of(pids: list[int]) -> list[Path]:
    return process_group.memory_of(pids)


def test_a_group_is_killed_and_what_it_left_removed(
    group: subprocess.Popen[str], tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    owned = OwnedProcesses(group.pid, folder=str(folder))
    owned.note()
    members = list(owned.processes)
    assert len(members) == 2 and group.pid in members
    assert owned.sockets == {str(tmp_path / "hivemind-x.sock")}
    record = tmp_path / f"p{process_group.RECORD_SUFFIX}"
    owned.save(record)
    assert list(process_group.records(tmp_path)) == [(record, owned)]

    assert owned.remove() == [], "nothing is taken from the living"
    assert len(memory_of(members)) == 2 and folder.is_dir()
    os.kill(group.pid, signal.SIGKILL)  # its child lives on, and still has the files
    group.wait()
    assert owned.living() == [pid for pid in members if pid != group.pid]
    owned.signal(signal.SIGKILL)
    assert dead(members)
    removed = owned.remove()
    assert len(removed) == 4 and memory_of(members) == [] and not folder.exists()
    assert (tmp_path / "other.sock").exists() and not (tmp_path / "hivemind-x.sock").exists()


def test_semaphores_of_a_killed_group_are_removed() -> None:
    """As those of torch's elastic agent, whose tracker of semaphores is killed with it."""
    script = (
        "import multiprocessing, sklearn.datasets\n"
        "event = multiprocessing.get_context('spawn').Event()\n"
        "print('ready', flush=True)\n"
        "event.wait()\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as agent:
        assert agent.stdout is not None and agent.stdout.readline() == "ready\n"
        owned = OwnedProcesses(agent.pid)
        owned.note()
        removed, made = owned.remove(), memory_of([agent.pid])
        owned.signal(signal.SIGKILL)
    assert removed == [] and len(made) == 5  # of an event
    assert dead(list(owned.processes))
    assert len(owned.remove()) == 5 and memory_of([agent.pid]) == []


def test_a_pid_that_was_used_again_is_somebody_else() -> None:
    mine = OwnedProcesses(os.getpid(), {os.getpid(): (started(os.getpid()) or 0) - 1})
    assert mine.living() == []
    mine.note()  # as at the end of a replicate
    assert mine.living() == []
    mine.signal(signal.SIGKILL)  # or this test ends here


def test_a_group_that_died_before_it_was_seen_is_cleared_by_its_pid(
    group: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "SOCKETS", tmp_path)
    ours, others = (tmp_path / f"hivemind-{pid}-x.sock" for pid in (group.pid, os.getpid()))
    ours.touch()
    others.touch()
    os.kill(group.pid, signal.SIGKILL)
    group.wait()
    owned = OwnedProcesses(group.pid)
    owned.note()
    child = [pid for pid in owned.processes if pid != group.pid]
    assert owned.living() == child and len(child) == 1
    owned.signal(signal.SIGKILL)
    assert dead(child)
    owned.remove()
    assert not ours.exists() and others.exists() and memory_of([group.pid, *child]) == []


def test_the_dead_and_zombies_have_no_start() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    with open(f"/proc/{process.pid}/stat"):
        deadline = time.monotonic() + 10
        while started(process.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert started(process.pid) is None, "a zombie"
    process.wait()
    assert started(process.pid) is None


def test_broken_records_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / f"a{process_group.RECORD_SUFFIX}").write_text("{")
    (tmp_path / f"b{process_group.RECORD_SUFFIX}").write_text("{}")
    assert list(process_group.records(tmp_path)) == []


def test_a_folder_that_vanishes_hides_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a peer that ends while another one is looked for."""
    for name in ("gone", "there"):
        (tmp_path / name).mkdir()
        OwnedProcesses(1).save(tmp_path / name / f"x{process_group.RECORD_SUFFIX}")
    scandir = os.scandir

    def racing(path: Any) -> Any:
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", racing)
    assert [path.parent.name for path, _ in process_group.records(tmp_path)] == ["there"]


def test_a_process_that_is_ending_has_no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def vanished(self: Any, kind: str) -> Any:
        raise FileNotFoundError("/proc/1/net/unix")

    monkeypatch.setattr(psutil.Process, "net_connections", vanished)
    owned = OwnedProcesses(os.getpid())
    owned.note()
    assert os.getpid() in owned.processes and owned.sockets == set()


def test_only_directories_of_dead_owners_are_orphaned(tmp_path: Path) -> None:
    names = ("living", "dead", "unclaimed")
    paths = {name: tmp_path / f"{process_group.DIRECTORY_PREFIX}{name}" for name in names}
    for path in paths.values():
        path.mkdir()
    process_group.claim(paths["living"], os.getpid())
    (paths["dead"] / process_group.OWNER_FILE).write_text(f"{os.getpid()} 1")
    assert process_group.orphaned(tmp_path) == [paths["dead"]]
    assert process_group.owned(tmp_path) == [(paths["living"], os.getpid())]


def claimed_in(directory: Path, pid: int, here: tuple[str, str, str]) -> None:
    """Claim a directory for a process of a machine of this description."""
    directory.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process_group, "place", lambda: here)
        process_group.claim(directory, pid)


@pytest.mark.parametrize("part", [0, 2], ids=["host", "pid namespace"])
def test_a_directory_of_another_machine_or_container_is_left_alone(
    part: int, tmp_path: Path
) -> None:
    """As on a shared file system, or of two containers with one /tmp. The pid is absent here."""
    there = list(process_group.place())
    there[part] = "other"
    directory = tmp_path / f"{process_group.DIRECTORY_PREFIX}x"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    claimed_in(directory, child.pid, (there[0], there[1], there[2]))
    assert process_group.owned(tmp_path) == []  # the pid is that of another process
    child.communicate(b"\n")
    process_group.clear_orphaned(tmp_path)
    assert process_group.orphaned(tmp_path) == process_group.owned(tmp_path) == []
    assert directory.is_dir()


def test_after_a_reboot_the_files_are_removed_and_nothing_is_signalled(tmp_path: Path) -> None:
    """The recorded pids belong to other processes."""
    directory = tmp_path / f"{process_group.DIRECTORY_PREFIX}x"
    host, _, namespace = process_group.place()
    claimed_in(directory, os.getpid(), (host, "earlier", namespace))
    left = tmp_path / "hivemind-left.sock"
    left.touch()
    with (directory / "log").open("w") as log:
        other = subprocess.Popen(["sleep", "300"], stdout=log, start_new_session=True)
    owned = OwnedProcesses(other.pid, sockets={str(left)})
    owned.note()
    owned.save(directory / f"p{process_group.RECORD_SUFFIX}")
    try:
        assert process_group.owned(tmp_path) == []
        process_group.clear_orphaned(tmp_path)
        assert not directory.exists() and not left.exists()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_directories_of_other_users_are_passed_over() -> None:
    """As of a testbed of root, on a machine that others use, too."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        base.chmod(0o755)
        other = base / f"{process_group.DIRECTORY_PREFIX}t0"
        other.mkdir(0o700)
        (other / process_group.OWNER_FILE).write_text(f"{os.getpid()} 1")
        os.seteuid(65534)
        try:
            assert process_group.orphaned(base) == process_group.owned(base) == []
        finally:
            os.seteuid(0)
        assert process_group.orphaned(base) == [other]


@pytest.fixture
def mounting() -> None:
    reason = capabilities.here()["mount"]
    if reason is not None:
        pytest.skip(reason)


def test_clearing_unmounts_first_and_removes_all(mounting: None, tmp_path: Path) -> None:
    directory = tmp_path / f"{process_group.DIRECTORY_PREFIX}a-dead"
    directory.mkdir()
    (directory / process_group.OWNER_FILE).write_text(f"{os.getpid()} 1")
    disk = SmallDisk(directory / "checkpoints", 2**20)
    disk.fill()
    try:
        process_group.clear(directory, patience=0.0)
        assert process_group.mounts_below(directory) == [] and not directory.exists()
    finally:
        disk.release()


def test_an_owner_is_known_until_all_is_gone(
    mounting: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / f"{process_group.DIRECTORY_PREFIX}a-dead"
    (directory / "logs").mkdir(parents=True)
    (directory / process_group.OWNER_FILE).write_text(f"{os.getpid()} 1")
    disk = SmallDisk(directory / "checkpoints", 2**20)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(process_group, "mounts_below", lambda directory: [])
            process_group.clear(directory, patience=0.0)
        assert process_group.orphaned(tmp_path) == [directory]
        assert not (directory / "logs").exists()
        process_group.clear(directory, patience=0.0)
        assert not directory.exists() and process_group.orphaned(tmp_path) == []
    finally:
        disk.release()


def test_the_guard_of_a_dead_driver_and_the_next_driver_may_clear_up_at_once(
    tmp_path: Path,
) -> None:
    """A driver that is started right after another was killed meets the guard of that one."""

    def remove_all() -> None:
        for directory in process_group.orphaned(tmp_path):
            process_group.remove_tree(directory, process_group.OWNER_FILE)

    for number in range(150):
        directory = tmp_path / f"{process_group.DIRECTORY_PREFIX}{number}"
        (directory / "logs").mkdir(parents=True)
        (directory / "logs" / "raylet.out").touch()
        (directory / process_group.OWNER_FILE).write_text("1 1")
    with ThreadPoolExecutor(4) as pool:
        for cleared in [pool.submit(remove_all) for _ in range(4)]:
            cleared.result(60.0)
    assert list(tmp_path.iterdir()) == []


def test_the_reaper_waits_for_its_owner_and_clears_up(
    group: subprocess.Popen[str], tmp_path: Path
) -> None:
    directory = tmp_path / f"{process_group.DIRECTORY_PREFIX}x"
    directory.mkdir()
    owned = OwnedProcesses(group.pid)
    owned.note()
    owned.save(directory / f"p{process_group.RECORD_SUFFIX}")
    members = list(owned.processes)
    code = "import sys, time; f = open(sys.argv[1], 'w'); time.sleep(600)"
    writer = subprocess.Popen([sys.executable, "-c", code, str(directory / "log")])
    with start_reaper(process_group.__name__, str(directory)) as reaper:
        assert reaper.stdin is not None
        status = Path(f"/proc/{reaper.pid}/status")
        eventually(lambda: int(status.read_text().split("SigIgn:")[1].split()[0], 16) & 1 << 14)
        reaper.send_signal(signal.SIGTERM)  # it has no right to go first
        with pytest.raises(subprocess.TimeoutExpired):
            reaper.wait(0.3)
        assert directory.is_dir() and started(group.pid)
        reaper.stdin.close()
        assert writer.wait(15) == -signal.SIGKILL
        assert reaper.wait(15) == 0
    group.wait()
    assert not directory.exists() and dead(members) and memory_of(members) == []
