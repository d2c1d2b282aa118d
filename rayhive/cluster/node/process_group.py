"""Processes and files of a process group, and their removal after it was killed.

A killed peer can't clean up: hivemind's unix sockets stay in a temporary directory, torch's shared
memory and named semaphores under ``/dev/shm``. Resources outside the peer's own directory without
one of its pids in their names are recorded while the peer lives. Only recorded resources are
removed.

Run as a program, this module is the reaper of an embedded Ray, and removes its private directory.
It has to start fast, so it imports little.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rayhive.cluster.node import machine
from rayhive.cluster.node.processes import await_owner, group_of, started, stat, wait_until
from rayhive.files import write_atomically

SHARED_MEMORY = Path("/dev/shm")
#: Shared memory of torch, and semaphores of multiprocessing with the names that joblib gives them.
_CREATED = re.compile(r"(?:torch_|sem\.loky-)(\d+)[_-]")
#: Folder of sockets whose paths would be too long elsewhere.
SOCKETS = Path("/tmp")
#: Suffix of the records of living peers, below the directory that owns them.
RECORD_SUFFIX = ".owns.json"
#: Prefix of rayhive's private directories, and the file in each with its owner's identity.
DIRECTORY_PREFIX = "rayhive-"
OWNER_FILE = "owner"
_MNT_DETACH = 2


@dataclass
class OwnedProcesses:
    """Record of a process group: its processes and files.

    Attributes:
        leader: Pid of the leader, which is also the id of the group; 0 before it is known.
        processes: Pid -> start time, of all members ever seen.
        sockets: Paths of unix sockets that members listened on.
        folder: Temporary directory of the group.
    """

    leader: int = 0
    processes: dict[int, int] = field(default_factory=dict)
    sockets: set[str] = field(default_factory=set)
    folder: str | None = None

    def note(self) -> None:
        """Add the present members and their sockets."""
        if not self.leader:
            return
        recorded = self.processes.get(self.leader)
        if recorded and started(self.leader) not in (None, recorded):
            return  # another process has the leader's pid, and a group of its own
        self.processes.setdefault(self.leader, 0)  # it may be dead already
        members = group_of(self.leader)
        for pid in members:
            start = started(pid)
            if start is not None:
                self.processes[pid] = start
        self.sockets |= _sockets_of(members)

    def save(self, path: Path) -> None:
        """Write the record to a file, which outlives this process."""
        text = json.dumps({**vars(self), "sockets": sorted(self.sockets)})
        write_atomically(path, text, durable=False)

    @classmethod
    def load(cls, path: Path) -> OwnedProcesses:
        """Read a record from a file of :meth:`save`.

        Raises:
            ValueError: The file is no such record.
        """
        data = json.loads(path.read_text(encoding="utf-8"))
        processes = {int(pid): int(start) for pid, start in data["processes"].items()}
        return cls(int(data["leader"]), processes, set(data["sockets"]), data["folder"])

    def living(self) -> list[int]:
        """Return the members that still run, including members without a record."""
        alive = {pid for pid, start in self.processes.items() if started(pid) == start}
        # The kernel does not reuse a leader's pid while its group has members, so a leader with
        # another start time leads another group.
        if self.leader and started(self.leader) in (None, self.processes.get(self.leader)):
            alive.update(group_of(self.leader))
        return sorted(alive)

    def signal(self, signum: int, members: Sequence[int] | None = None) -> list[int]:
        """Send a signal to living members, to all of the leader's process group with one call.

        Args:
            signum: The signal.
            members: Processes to signal; None for all. Processes of other owners are left out.

        Returns:
            The pids that got the signal.
        """
        living = self.living()
        hit: set[int] = set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            grouped = [pid for pid in living if (s := stat(pid)) and int(s[2]) == self.leader]
            if members is None and grouped:
                os.killpg(self.leader, signum)
                hit.update(grouped)
        for pid in living:
            if pid not in hit and (members is None or pid in members):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signum)
                    hit.add(pid)
        return sorted(hit)

    def states(self, members: Sequence[int] | None = None) -> dict[int, str]:
        """Return the states of processes.

        Args:
            members: Processes to check; None for all that were ever seen.

        Returns:
            pid -> ``running``, ``stopped`` or ``gone``; a pid of another owner is ``gone``.
        """
        living = self.living()
        asked: Iterable[int] = {*living, *self.processes} if members is None else members
        return {pid: _state(pid) if pid in living else "gone" for pid in sorted(asked)}

    def sockets_of(self, pids: Iterable[int]) -> list[Path]:
        """Return the recorded sockets, and those with one of the pids in their names."""
        named = (path for pid in pids for path in SOCKETS.glob(f"hivemind-{pid}-*.sock"))
        return sorted({*map(Path, self.sockets), *named})

    def remove(self) -> list[str]:
        """Remove the files of dead members; return the paths.

        Files of living members stay.
        """
        alive = self.living()
        dead = {pid for pid in self.processes if started(pid) is None}
        removed = [text for path in memory_of(dead) for text in _unlink(path)]
        if not alive:
            removed += [text for path in self.sockets_of(dead) for text in _unlink(path)]
            if self.folder is not None and Path(self.folder).exists():
                remove_tree(Path(self.folder))
                removed.append(self.folder)
        return removed


def _state(pid: int) -> str:
    fields = stat(pid)
    if fields is None:
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def shared_memory() -> dict[Path, int]:
    """Return the files in shared memory with their creator's pid in their names, and that pid."""
    named = ((path, _CREATED.match(path.name)) for path in sorted(SHARED_MEMORY.glob("*")))
    return {path: int(found[1]) for path, found in named if found}


def memory_of(pids: Collection[int]) -> list[Path]:
    """Return the shared memory and the semaphores that these processes made."""
    return [path for path, creator in shared_memory().items() if creator in pids]


def _unlink(path: Path) -> list[str]:
    try:
        path.unlink()
    except OSError:
        return []
    return [str(path)]


def _sockets_of(pids: Iterable[int]) -> set[str]:
    """Return the paths of hivemind's unix sockets in these processes."""
    found: set[str] = set()
    for pid in pids:
        # of a process that is ending, /proc may lack a file before it lacks the process
        with contextlib.suppress(psutil.Error, OSError):
            found.update(str(each.laddr) for each in psutil.Process(pid).net_connections("unix"))
    return {path for path in found if Path(path).name.startswith("hivemind-")}


def records(directory: Path) -> Iterator[tuple[Path, OwnedProcesses]]:
    """Yield the records below ``directory``; files that are unreadable or vanish are skipped."""
    found = (Path(at, name) for at, _, names in os.walk(directory) for name in names)
    for path in sorted(path for path in found if path.name.endswith(RECORD_SUFFIX)):
        with contextlib.suppress(OSError, ValueError, KeyError):
            yield path, OwnedProcesses.load(path)


def clear(directory: Path, patience: float = 5.0) -> None:
    """Remove a private directory of rayhive with the processes and files of its records.

    Args:
        directory: The directory.
        patience: Time for its processes to end by themselves [s].
    """
    owner = _owner(directory)
    if owner.rebooted:  # the recorded pids belong to other processes now
        for socket in [path for _, owned in records(directory) for path in owned.sockets]:
            _unlink(Path(socket))
    else:
        wait_until(lambda: not _users_of(directory, owner.pid), patience, every=0.05)
        for pid in _users_of(directory, owner.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        clear_records(directory)
    remove_tree(directory, OWNER_FILE)


def clear_records(directory: Path) -> list[str]:
    """Kill the processes of the records below a directory; return the files that were removed."""
    owners = [owned for _, owned in records(directory)]
    for owned in owners:
        owned.signal(signal.SIGKILL)
    wait_until(lambda: not any(owned.living() for owned in owners), 5.0)
    return [path for owned in owners for path in owned.remove()]


def remove_tree(directory: Path, last: str | None = None) -> bool:
    """Unmount all file systems below a directory, and remove the directory.

    Other processes may be removing it at the same time: the guard of a driver that was killed, and
    the next driver.

    Args:
        directory: The directory; it need not exist.
        last: Name of the file that identifies its owner. It is removed last, so that a partly
            removed directory is still known as rayhive's.

    Returns:
        Whether the directory is gone.
    """
    for point in mounts_below(directory):
        with contextlib.suppress(OSError):
            unmount(point)
    if last is not None and (directory / last).exists():
        for path in _content(directory):
            if path.name == last:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                _unlink(path)
        if any(path.name != last for path in _content(directory)):
            return False
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


def _content(directory: Path) -> list[Path]:
    """Return the files and folders in a directory; none if it is gone."""
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def mounts_below(directory: Path) -> list[Path]:
    """Return the mount points in or below a directory, the deepest first."""
    points = (Path(mount.mountpoint) for mount in psutil.disk_partitions(all=True))
    return sorted((p for p in points if p == directory or directory in p.parents), reverse=True)


def unmount(point: Path) -> None:
    """Unmount lazily; open files stay usable.

    Raises:
        OSError: The kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(point), _MNT_DETACH) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(point))


def _users_of(directory: Path, owner: int | None) -> list[int]:
    """Return the processes with a file in ``directory`` open for writing, as all of Ray's have.

    Readers, such as a ``tail -f``, are excluded, and so is the living owner, which is closing its
    own files.
    """
    marker = f"{directory}/"
    found = []
    for process in psutil.process_iter():
        if process.pid in (os.getpid(), owner):
            continue
        with contextlib.suppress(psutil.Error):
            if any(f.mode != "r" and f.path.startswith(marker) for f in process.open_files()):
                found.append(process.pid)
    return found


def place() -> tuple[str, str, str]:
    """Return the host, the boot of its kernel and the PID namespace, in which a pid is valid."""
    namespace = None
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    host, boot = os.uname().nodename, machine.boot_id()
    return host or "unknown", boot or "unknown", str(namespace or "unknown")


def claim(directory: Path, pid: int) -> None:
    """Record a process as the owner of a private directory."""
    text = " ".join(map(str, (pid, started(pid), *place())))
    write_atomically(directory / OWNER_FILE, text, durable=False)


@dataclass(frozen=True)
class _Owner:
    """Owner of a private directory.

    Attributes:
        pid: Its pid if it lives here; None otherwise.
        elsewhere: Whether it is of another host or container, where it may live.
        rebooted: Whether this host has booted since, which ended all of its processes.
    """

    pid: int | None = None
    elsewhere: bool = False
    rebooted: bool = False


def _owner(directory: Path) -> _Owner:
    try:
        pid, start, *there = (directory / OWNER_FILE).read_text(encoding="utf-8").split()
        if there:  # earlier versions of rayhive recorded pid and start time only
            host, boot, namespace = place()
            if there[0] != host:
                return _Owner(elsewhere=True)
            if there[1] != boot:
                return _Owner(rebooted=True)
            if there[2] != namespace:
                return _Owner(elsewhere=True)
        return _Owner(int(pid) if started(int(pid)) == int(start) else None)
    except (OSError, ValueError, IndexError):
        return _Owner()


def _private(base: Path) -> Iterator[tuple[Path, _Owner]]:
    """Yield this user's private directories below ``base``, and their owners."""
    for directory in sorted(base.glob(f"{DIRECTORY_PREFIX}*")):
        try:
            mine = directory.stat().st_uid == os.geteuid() and (directory / OWNER_FILE).exists()
        except (FileNotFoundError, PermissionError):  # just removed, or of another user
            continue
        if mine:
            yield directory, _owner(directory)


def owned(base: Path) -> list[tuple[Path, int]]:
    """Return the private directories below ``base`` with living owners, and the owners' pids."""
    found = ((directory, owner.pid) for directory, owner in _private(base))
    return [(directory, pid) for directory, pid in found if pid is not None]


def clear_orphaned(base: Path) -> None:
    """Remove the private directories below ``base`` with dead owners."""
    for directory in orphaned(base):
        clear(directory, patience=0.0)


def orphaned(base: Path) -> list[Path]:
    """Return the private directories below ``base`` with dead owners."""
    found = _private(base)
    return [path for path, owner in found if owner.pid is None and not owner.elsewhere]


if __name__ == "__main__":
    await_owner()
    clear(Path(sys.argv[1]))
