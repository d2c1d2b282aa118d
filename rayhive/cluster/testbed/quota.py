"""A share of the processors for each node, by the kernel's control groups."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from rayhive.errors import ClusterError

_PERIOD = 100_000  # microseconds
_ROOT = Path("/sys/fs/cgroup")
_PATIENCE = 3.0


def home() -> Path | None:
    """Return the folder of the control group that groups for nodes go into, if there is one."""
    if (_ROOT / "cpu").is_dir():
        folder = _ROOT / "cpu" / _mine("cpu").lstrip("/")
    elif (_ROOT / "cgroup.controllers").is_file():
        # Only the root may hold processes and have groups with limits in it.
        folder = _ROOT
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text("+cpu")
    else:
        return None
    return folder if os.access(folder, os.W_OK) else None


def make(folder: Path) -> None:
    """Make a group."""
    folder.mkdir(exist_ok=True)


def limit(folder: Path, cores: float | None) -> None:
    """Give a group so many cores' worth of time; None for no limit.

    Raises:
        ClusterError: The kernel refuses.
    """
    quota = -1 if cores is None else max(1000, round(cores * _PERIOD))
    try:
        if (folder / "cpu.max").exists():
            amount = "max" if quota < 0 else str(quota)
            (folder / "cpu.max").write_text(f"{amount} {_PERIOD}")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError as error:
        raise ClusterError(f"{folder}: no CPU quota: {error}") from error


def limited(folder: Path) -> float | None:
    """Return the cores' worth of time that a group may use; None for no limit."""
    if (folder / "cpu.max").exists():
        amount, period = (folder / "cpu.max").read_text().split()
        return None if amount == "max" else int(amount) / int(period)
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    period_us = int((folder / "cpu.cfs_period_us").read_text())
    return None if quota < 0 else quota / period_us


def members(folder: Path) -> list[int]:
    """Return the processes in a group and the groups in it."""
    found = []
    for file in folder.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            found += [int(line) for line in file.read_text(encoding="ascii").split()]
    return found


def remove(folder: Path) -> None:
    """Remove a group with the groups in it, after the last of its processes; none is fine."""
    if not folder.is_dir():
        return
    for inner in folder.iterdir():
        if inner.is_dir():
            remove(inner)
    deadline = time.monotonic() + _PATIENCE
    while folder.is_dir():
        try:
            folder.rmdir()
        except OSError:  # a process that was killed has not quite gone
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)


def _mine(controller: str) -> str:
    """Return the path of this process's group in a hierarchy of version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"
