"""Processes and files of a process group, and their removal after it was killed.

A killed peer can't clean up: hivemind's unix sockets stay in a temporary directory, torch's shared
memory stays under ``/dev/shm``. Resources outside the peer's own directory without one of its pids
in their names are recorded while the peer lives. Only recorded resources are removed.

Run as a script, this module is the *reaper* beside an embedded Ray: it waits for the end of its
owner, also by SIGKILL, and then removes its private directory. It needs the standard library
alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
#: Folder of sockets whose paths would be too long elsewhere.
SOCKETS = Path("/tmp")
#: Suffix of the records of living peers, below the directory that owns them.
RECORD_SUFFIX = ".owns.json"
#: Prefix of rayhive's private directories, and the file in each with its owner's identity.
DIRECTORY_PREFIX = "rayhive-"
OWNER_FILE = "owner"
_MNT_DETACH = 2


def started(pid: int) -> int | None:
    """Return the start time of a process [clock ticks since boot]; None if no such process runs.

    Pid and start time together identify a process, as the kernel reuses pids. A zombie counts as
    gone.
    """
    found = _stat(pid)
    return None if found is None or found[0] == "Z" else int(found[19])


def group_of(leader: int) -> list[int]:
    """Return the processes in the session or the process group of ``leader``."""
    members = []
    for pid in _pids():
        found = _stat(pid)
        if found is not None and found[0] != "Z" and leader in (int(found[2]), int(found[3])):
            members.append(pid)
    return members


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the third on (the state; see proc(5))."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


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
        self.processes.setdefault(self.leader, 0)  # it may be dead already
        members = group_of(self.leader)
        for pid in members:
            start = started(pid)
            if start is not None:
                self.processes[pid] = start
        self.sockets |= _sockets_of(members)

    def save(self, path: Path) -> None:
        """Write the record to a file, which outlives this process."""
        text = json.dumps(
            {
                "leader": self.leader,
                "processes": {str(pid): start for pid, start in self.processes.items()},
                "sockets": sorted(self.sockets),
                "folder": self.folder,
            }
        )
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> OwnedProcesses:
        """Read a record from a file of :meth:`save`.

        Raises:
            ValueError: The file is no such record.
        """
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            leader=int(data["leader"]),
            processes={int(pid): int(start) for pid, start in data["processes"].items()},
            sockets=set(data["sockets"]),
            folder=data["folder"],
        )

    def living(self) -> list[int]:
        """Return the members that still run, including members without a record."""
        alive = {pid for pid, start in self.processes.items() if started(pid) == start}
        # The kernel does not reuse a leader's pid while its group has members, so a leader with
        # another start time leads another group.
        if started(self.leader) in (None, self.processes.get(self.leader)):
            alive.update(group_of(self.leader))
        return sorted(alive)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send ``signum`` to every living member."""
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)

    def remove(self) -> list[str]:
        """Remove the files of dead members; return the paths.

        Files of living members stay.
        """
        removed = []
        alive = self.living()
        dead = {pid for pid in self.processes if started(pid) is None}
        for path in shared_memory():
            if creator_of(path) in dead:
                removed += _unlink(path)
        if not alive:
            sockets = {Path(path) for path in self.sockets}
            for pid in dead:
                sockets.update(SOCKETS.glob(f"hivemind-{pid}-*.sock"))
            for socket in sorted(sockets):
                removed += _unlink(socket)
            if self.folder is not None and Path(self.folder).exists():
                remove_tree(Path(self.folder))
                removed.append(self.folder)
        return removed


def shared_memory() -> list[Path]:
    """Return torch's shared memory files."""
    return sorted(SHARED_MEMORY.glob("torch_*"))


def creator_of(path: Path) -> int | None:
    """Return the pid in the name of a shared memory file of torch; None without one."""
    parts = path.name.split("_")
    return int(parts[1]) if len(parts) > 2 and parts[1].isdigit() else None


def _unlink(path: Path) -> list[str]:
    try:
        path.unlink()
    except OSError:
        return []
    return [str(path)]


def _sockets_of(pids: Iterable[int]) -> set[str]:
    """Return the paths of hivemind's unix sockets in these processes."""
    inodes: set[str] = set()
    names: dict[str, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            with os.scandir(f"/proc/{pid}/fd") as entries:
                for entry in entries:
                    target = os.readlink(entry.path)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
            for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
                fields = line.split(maxsplit=7)
                if len(fields) == 8 and Path(fields[7]).name.startswith("hivemind-"):
                    names[fields[6]] = fields[7]
    return {path for inode, path in names.items() if inode in inodes}


def records(directory: Path) -> Iterator[tuple[Path, OwnedProcesses]]:
    """Yield the records below ``directory``; unreadable files are skipped."""
    for path in sorted(directory.rglob(f"*{RECORD_SUFFIX}")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            yield path, OwnedProcesses.load(path)


def clear(directory: Path, patience: float = 5.0) -> None:
    """Remove a private directory of rayhive with the processes and files of its records.

    Args:
        directory: The directory.
        patience: Time for its processes to end by themselves [s].
    """
    owner = _owner(directory)
    deadline = time.monotonic() + patience
    while _users_of(directory, owner) and time.monotonic() < deadline:
        time.sleep(0.05)
    for _, owned in records(directory):
        owned.kill()
    for pid in _users_of(directory, owner):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        if not any(owned.living() for _, owned in records(directory)):
            break
        time.sleep(0.02)
    for _, owned in records(directory):
        owned.remove()
    remove_tree(directory, OWNER_FILE)


def remove_tree(directory: Path, last: str | None = None) -> bool:
    """Unmount all file systems below a directory, and remove the directory.

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
        for path in directory.iterdir():
            if path.name == last:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                _unlink(path)
        if [path.name for path in directory.iterdir()] != [last]:
            return False
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


def mounts_below(directory: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> list[Path]:
    """Return the mount points in or below a directory, the deepest first."""
    points = (mount.point for mount in mounts(mountinfo))
    return sorted((p for p in points if p == directory or directory in p.parents), reverse=True)


@dataclass(frozen=True)
class Mount:
    """A mounted file system: mount point and name of the source."""

    point: Path
    source: str


def mounts(mountinfo: Path = Path("/proc/self/mountinfo")) -> Iterator[Mount]:
    """Yield the mounts of this process's namespace (proc(5), ``mountinfo``)."""
    for line in mountinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        head, _, tail = line.partition(" - ")
        point = head.split()[4].encode().decode("unicode_escape")
        yield Mount(Path(point), tail.split()[1])


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
    for pid in _pids():
        if pid in (os.getpid(), owner):
            continue
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                if os.readlink(entry.path).startswith(marker) and _writes(pid, entry.name):
                    found.append(pid)
                    break
    return found


def _writes(pid: int, descriptor: str) -> bool:
    for line in Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().splitlines():
        if line.startswith("flags:"):
            return bool(int(line.split()[1], 8) & (os.O_WRONLY | os.O_RDWR))
    return False


def claim(directory: Path, pid: int) -> None:
    """Record ``pid`` as the owner of a private directory."""
    (directory / OWNER_FILE).write_text(f"{pid} {started(pid)}", encoding="utf-8")


def _owner(directory: Path) -> int | None:
    """Return the pid of the directory's owner; None if it is dead."""
    try:
        pid, start = (directory / OWNER_FILE).read_text(encoding="utf-8").split()
        return int(pid) if started(int(pid)) == int(start) else None
    except (OSError, ValueError):
        return None


def owned(base: Path) -> list[tuple[Path, int]]:
    """Return the private directories below ``base`` with living owners, and the owners' pids."""
    found = []
    for directory in sorted(base.glob(f"{DIRECTORY_PREFIX}*")):
        pid = _owner(directory)
        if pid is not None and directory.stat().st_uid == os.getuid():
            found.append((directory, pid))
    return found


def orphaned(base: Path) -> list[Path]:
    """Return the private directories below ``base`` with dead owners."""
    return [
        directory
        for directory in sorted(base.glob(f"{DIRECTORY_PREFIX}*"))
        if (directory / OWNER_FILE).exists()
        and directory.stat().st_uid == os.getuid()
        and _owner(directory) is None
    ]


def main(directory: str) -> None:
    """Wait for the end of the owner, which holds the other end of stdin, and clear up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    clear(Path(directory))


if __name__ == "__main__":
    main(sys.argv[1])
