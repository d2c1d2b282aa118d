"""Control groups of the kernel, version 1 or 2: their location, and limits of CPU time."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from rayhive.cluster.node.processes import marked, started, wait_until
from rayhive.errors import ClusterError

#: Prefix of the names of rayhive's groups, followed by pid and start time of their maker.
PREFIX = "rayhive-"
_NAME = re.compile(rf"{PREFIX}(\d+)\.(\d+)-.+")
_ROOT = Path("/sys/fs/cgroup")
#: Scheduling period of a peer's limit, and the smallest quota that the kernel accepts [us].
_PERIOD_US = 50_000
_SMALLEST_QUOTA_US = 1_000
_REMOVE_S = 3.0


def own(controller: str, proc: Path = Path("/proc/self")) -> tuple[int, Path]:
    """Return the version of a controller's hierarchy, and this process's own group there.

    Raises:
        ClusterError: No such hierarchy is mounted.
    """
    for version, _, folder in _hierarchies(controller, proc):
        if version == 1 or controller in _words(folder / "cgroup.controllers"):
            return version, folder
    raise ClusterError(f"no control groups for {controller} are mounted")


def _hierarchies(controller: str, proc: Path) -> Iterator[tuple[int, Path, Path]]:
    """Yield version, mount point and own group of each hierarchy that may have a controller."""
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
            yield 1, Path(point), _below(Path(point), root, paths.get(controller, "/"))
        if kind == "cgroup2" and "" in paths:
            yield 2, Path(point), _below(Path(point), root, paths[""])


def _below(point: Path, root: str, path: str) -> Path:
    """Return the folder of a group; in a container the hierarchy is mounted from ``root`` on."""
    inside = path[len(root) :] if root != "/" and path.startswith(root) else path
    return point / inside.lstrip("/")


def _words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except OSError:
        return []


def write(folder: Path, name: str, text: str) -> None:
    """Write one of a group's files.

    Raises:
        OSError: The kernel refuses, or has no such file.
    """
    # opened without O_CREAT: without the kernel's file there is no such limit
    with open(os.open(folder / name, os.O_WRONLY), "w", encoding="ascii") as file:
        file.write(text)


def limit(folder: Path, cores: float | None, period_us: int) -> None:
    """Limit the CPU time of a group.

    Args:
        folder: The group.
        cores: CPU time [s/s]; None for no limit.
        period_us: Scheduling period [us].

    Raises:
        ClusterError: The kernel refuses the limit.
    """
    quota = -1 if cores is None else max(_SMALLEST_QUOTA_US, round(cores * period_us))
    try:
        if (folder / "cpu.cfs_quota_us").exists():
            write(folder, "cpu.cfs_period_us", str(period_us))
            write(folder, "cpu.cfs_quota_us", str(quota))
        else:
            write(folder, "cpu.max", f"{'max' if quota < 0 else quota} {period_us}")
    except OSError as error:
        raise ClusterError(f"{folder} takes no CPU quota: {error}") from error


def quota(proc: Path = Path("/proc/self")) -> float:
    """Return the CPU time that this process's groups and their ancestors allow [s/s].

    It is infinity without a limit. A container has the limit of its own group.
    """
    least = math.inf
    with contextlib.suppress(OSError):
        for _, point, folder in _hierarchies("cpu", proc):
            above = [parent for parent in folder.parents if parent.is_relative_to(point)]
            least = min(least, *map(_cores, (folder, *above)))
    return least


def _cores(folder: Path) -> float:
    """Return the limit of a group of version 1 or 2 [s/s]; infinity if it has none."""
    words = _words(folder / "cpu.max")
    if not words:
        words = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
    if len(words) != 2 or words[0] in ("max", "-1"):
        return math.inf
    return int(words[0]) / int(words[1])


def members(folder: Path) -> list[int]:
    """Return the processes in a group and in its child groups."""
    return [int(word) for file in folder.rglob("cgroup.procs") for word in _words(file)]


def may_limit_children(folder: Path) -> bool:
    """Return whether child groups of a mount of version 2 can have limits of CPU time.

    Only the root group, which has no type, may hold processes besides. In a container the mount is
    often another group.
    """
    root = not (folder / "cgroup.type").exists()
    return root or "cpu" in _words(folder / "cgroup.subtree_control")


def home_of_testbeds() -> Path | None:
    """Return the folder for the groups of testbeds' nodes; None if it takes none."""
    if (_ROOT / "cgroup.controllers").is_file():
        folder = _ROOT
        if not may_limit_children(folder):
            return None
        with contextlib.suppress(OSError):
            write(folder, "cgroup.subtree_control", "+cpu")
    else:
        try:
            folder = own("cpu")[1]
        except (ClusterError, OSError):
            return None
    return folder if os.access(folder, os.W_OK) else None


class CpuLimit:
    """A control group whose processes together get a limited CPU time.

    Args:
        label: Last part of the group's name.
        cores: CPU time [s/s].

    Raises:
        ClusterError: The kernel does not allow it, or the limit would lift the one that the group
            of this process has.
    """

    def __init__(self, label: str, cores: float) -> None:
        version, self._home = own("cpu")
        parent = self._home
        if version == 2 and "cpu" not in _words(parent / "cgroup.subtree_control"):
            parent = parent.parent  # a group with processes can't delegate
            if cores >= (present := _cores(self._home)):
                raise ClusterError(f"{cores:g} cores must be less than the {present:g} of now")
        self.folder = parent / f"{PREFIX}{marked(label)}"
        try:
            self.folder.mkdir()
        except OSError as error:
            raise ClusterError(f"no control group can be made in {parent}: {error}") from error
        try:
            limit(self.folder, cores, _PERIOD_US)
        except ClusterError:
            self.release()
            raise

    def add(self, pids: Iterable[int]) -> list[int]:
        """Move processes into the group; return the pids that had not ended."""
        moved = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                write(self.folder, "cgroup.procs", str(pid))
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

    def removed() -> bool:
        for pid in _words(folder / "cgroup.procs"):
            with contextlib.suppress(OSError):  # it ended, or is about to
                write(home, "cgroup.procs", pid)
        return _rmdir(folder)

    if not wait_until(removed, _REMOVE_S):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(folder))


def remove(folder: Path) -> None:
    """Remove a group with its child groups, if it exists, once its processes have ended."""
    with contextlib.suppress(OSError):
        for inner in list(folder.iterdir()):
            if inner.is_dir():
                remove(inner)
        wait_until(lambda: _rmdir(folder), _REMOVE_S)


def _rmdir(folder: Path) -> bool:
    """Remove a group; return False if a process of it is exiting."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


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
