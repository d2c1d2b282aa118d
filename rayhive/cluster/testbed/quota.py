"""CPU quotas of the nodes, by control groups of the kernel."""

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
    """Return the folder of the parent of the nodes' control groups; None if it is not writable."""
    if (_ROOT / "cpu").is_dir():
        folder = _ROOT / "cpu" / _mine("cpu").lstrip("/")
    elif (_ROOT / "cgroup.controllers").is_file():
        # Only the root group may hold processes and have child groups with limits.
        folder = _ROOT
        with contextlib.suppress(OSError):
            (folder / "cgroup.subtree_control").write_text("+cpu")
    else:
        return None
    return folder if os.access(folder, os.W_OK) else None


def make(folder: Path) -> None:
    """Create a group."""
    folder.mkdir(exist_ok=True)


def limit(folder: Path, cores: float | None) -> None:
    """Limit the CPU time of a group.

    Args:
        folder: The group.
        cores: CPU time [cores]; None for no limit.

    Raises:
        ClusterError: The kernel refused the limit.
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
    """Return the limit of the CPU time of a group [cores]; None for no limit."""
    if (folder / "cpu.max").exists():
        amount, period = (folder / "cpu.max").read_text().split()
        return None if amount == "max" else int(amount) / int(period)
    quota = int((folder / "cpu.cfs_quota_us").read_text())
    period_us = int((folder / "cpu.cfs_period_us").read_text())
    return None if quota < 0 else quota / period_us


def members(folder: Path) -> list[int]:
    """Return the pids of the processes in a group and in its child groups."""
    found = []
    for file in folder.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            found += [int(line) for line in file.read_text(encoding="ascii").split()]
    return found


def remove(folder: Path) -> None:
    """Remove a group with its child groups, if it exists, once its processes have ended."""
    if not folder.is_dir():
        return
    for inner in folder.iterdir():
        if inner.is_dir():
            remove(inner)
    deadline = time.monotonic() + _PATIENCE
    while folder.is_dir():
        try:
            folder.rmdir()
        except OSError:  # a killed process has not ended yet
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)


def _mine(controller: str) -> str:
    """Return the path of this process's group in a hierarchy of cgroup version 1."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"
