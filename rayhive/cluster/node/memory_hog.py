"""Memory that a process of its own holds, so that others on the node have less."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil

from rayhive.cluster.node import cgroups
from rayhive.errors import ClusterError

#: What stays free for the system, whatever a plan asks for.
_RESERVE, _RESERVE_SHARE = 512 * 2**20, 0.1
#: Bytes other than zero, or the kernel would lend one page for all; the first to be killed if
#: memory runs out; ends when the agent does, as that closes its standard input.
_HOLD = """
import sys
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
with open("/proc/self/statm") as file:
    print(file.read().split()[1])
held = b"\\1" * int(sys.argv[1])
sys.stdout.flush()
sys.stdin.read()
"""


def free_memory() -> int:
    """Return the memory that may be held on this machine besides a reserve [bytes]."""
    memory = psutil.virtual_memory()
    reserve = max(_RESERVE, round(_RESERVE_SHARE * memory.total))
    return max(0, min(memory.available, _allowed()) - reserve)


def _allowed() -> int:
    """Return what the control group of this process may still take [bytes]."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("memory.max", "memory.current"),
    }
    with contextlib.suppress(ClusterError, OSError, ValueError):
        version, folder = cgroups.own("memory")
        limit, used = (int((folder / name).read_text()) for name in names[version])
        return max(0, limit - used)
    return sys.maxsize  # "max" is no number: no limit


class MemoryHog:
    """A process that holds memory and touches all of it.

    Args:
        size: How much [bytes].

    Raises:
        ClusterError: That would not leave the machine its reserve, or it can't be had.
    """

    def __init__(self, size: int) -> None:
        free = free_memory()
        if size > free:
            free_mb = f"besides a reserve, {free / 1e6:.0f} MB are free"
            raise ClusterError(f"{size / 1e6:.0f} MB can't be held: {free_mb}")
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _HOLD, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path("/"),
            start_new_session=True,
        )
        told = self._process.stdout.readline() if self._process.stdout is not None else b""
        if not told:
            self.release()
            raise ClusterError(f"{size} bytes could not be had: the process that asked died")
        self._without = int(told) * os.sysconf("SC_PAGE_SIZE")

    @property
    def pid(self) -> int:
        """The process that holds it."""
        return self._process.pid

    def rss(self) -> int:
        """Return how much of it is in memory [bytes]; 0 if the process is gone."""
        if self._process.poll() is not None:
            return 0
        try:
            return max(0, psutil.Process(self.pid).memory_info().rss - self._without)
        except psutil.NoSuchProcess:
            return 0

    def release(self) -> None:
        """Give the memory back; calling it again does nothing."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
