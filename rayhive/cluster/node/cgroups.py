"""Control groups of the kernel, version 1 or 2: their location, and a limit of CPU time."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from rayhive.cluster.node.process_group import started
from rayhive.errors import ClusterError

#: Prefix of the names of rayhive's groups, followed by pid and start time of their maker.
PREFIX = "rayhive-"
_NAME = re.compile(rf"{PREFIX}(\d+)\.(\d+)-.+")
#: Scheduling period, and the smallest quota that the kernel accepts [us].
_PERIOD_US = 50_000
_SMALLEST_QUOTA_US = 1_000
_REMOVE_S = 2.0


def own(controller: str, proc: Path = Path("/proc/self")) -> tuple[int, Path]:
    """Return the version of a controller's hierarchy, and this process's own group there.

    Raises:
        ClusterError: No such hierarchy is mounted.
    """
    paths = {}
    for line in (proc / "cgroup").read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    for line in (proc / "mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split(maxsplit=2)
        if kind == "cgroup" and controller in options.split(","):
            return 1, _below(Path(point), root, paths.get(controller, "/"))
        if kind == "cgroup2" and "" in paths:
            found = _below(Path(point), root, paths[""])
            if controller in _words(found / "cgroup.controllers"):
                return 2, found
    raise ClusterError(f"no control groups for {controller} are mounted")


def _below(point: Path, root: str, path: str) -> Path:
    """Return the folder of a group; in a container the hierarchy is mounted from ``root`` on."""
    inside = path[len(root) :] if root != "/" and path.startswith(root) else path
    return point / inside.lstrip("/")


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []


class CpuLimit:
    """A control group whose processes together get a limited CPU time.

    Args:
        label: Last part of the group's name.
        cores: CPU time [s/s].

    Raises:
        ClusterError: The kernel does not allow it.
    """

    def __init__(self, label: str, cores: float) -> None:
        self._version, self._home = own("cpu")
        parent = self._home
        if self._version == 2 and "cpu" not in _words(parent / "cgroup.subtree_control"):
            parent = parent.parent  # a group with processes can't delegate
        self.folder = parent / f"{PREFIX}{os.getpid()}.{started(os.getpid())}-{label}"
        quota = max(_SMALLEST_QUOTA_US, round(cores * _PERIOD_US))
        try:
            self.folder.mkdir()
        except OSError as error:
            raise ClusterError(f"no control group can be made in {parent}: {error}") from error
        try:
            if self._version == 2:
                self._write("cpu.max", f"{quota} {_PERIOD_US}")
            else:
                self._write("cpu.cfs_period_us", str(_PERIOD_US))
                self._write("cpu.cfs_quota_us", str(quota))
        except OSError as error:
            self.release()
            raise ClusterError(f"{self.folder} takes no CPU quota: {error}") from error

    def _write(self, name: str, text: str) -> None:
        # opened without O_CREAT: without the kernel's file there is no such limit
        descriptor = os.open(self.folder / name, os.O_WRONLY)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)

    def members(self) -> list[int]:
        """Return the processes in the group."""
        return [int(word) for word in _words(self.folder / "cgroup.procs")]

    def add(self, pids: Iterable[int]) -> list[int]:
        """Move processes into the group; return the pids that had not ended."""
        moved = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._write("cgroup.procs", str(pid))
                moved.append(pid)
        return moved

    def stat(self) -> dict[str, float]:
        """Return ``periods``, ``throttled`` (periods with a used-up quota) and ``throttled_s``."""
        text = (self.folder / "cpu.stat").read_text(encoding="utf-8")
        values = {key: int(value) for key, value in map(str.split, text.splitlines())}
        waited = values.get("throttled_time", 1000 * values.get("throttled_usec", 0))
        return {
            "periods": values.get("nr_periods", 0),
            "throttled": values.get("nr_throttled", 0),
            "throttled_s": waited / 1e9,
        }

    def release(self) -> None:
        """Move the processes out and remove the group; a second call does nothing."""
        dissolve(self.folder, self._home)


def dissolve(folder: Path, home: Path) -> None:
    """Move the members of a group to ``home`` and remove it.

    Raises:
        OSError: The group can't be removed.
    """
    deadline = time.monotonic() + _REMOVE_S
    while folder.is_dir():
        for pid in _words(folder / "cgroup.procs"):
            with contextlib.suppress(OSError):  # it ended, or is about to
                (home / "cgroup.procs").write_text(pid, encoding="utf-8")
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                raise
            time.sleep(0.02)  # a member is exiting; the kernel sends no notification


def made_here() -> list[Path]:
    """Return the groups of rayhive next to or below this process's own group."""
    try:
        version, home = own("cpu")
    except (ClusterError, OSError):
        return []
    places = (home, home.parent) if version == 2 else (home,)
    found = {path for place in places for path in place.glob(f"{PREFIX}*") if path.is_dir()}
    return sorted(path for path in found if _NAME.fullmatch(path.name))


def remove_dead() -> list[str]:
    """Remove the groups whose makers are dead; return their paths."""
    removed = []
    for path in made_here():
        name = _NAME.fullmatch(path.name)
        if name is not None and started(int(name[1])) != int(name[2]):
            with contextlib.suppress(OSError, ClusterError):
                dissolve(path, own("cpu")[1])
                removed.append(str(path))
    return removed
