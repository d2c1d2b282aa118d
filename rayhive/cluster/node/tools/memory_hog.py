"""Tool ``memory_hog``: a process that holds memory, so that peers on the node have less."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil

from rayhive.cluster.node import cgroups
from rayhive.cluster.node.tools.base import Site, Tool
from rayhive.errors import ClusterError
from rayhive.faults.node_tools import HeldMemory, MemorySize

#: Memory that stays free for the system: the greater of an amount [bytes] and a share.
_RESERVE, _RESERVE_SHARE = 512 * 2**20, 0.1
#: Program that holds the memory. It writes bytes other than zero, as the kernel would share one
#: page of zeros; it is the first to be killed if memory runs out; it ends when the agent's end
#: closes its standard input.
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
    """Return the memory that may be held on this machine besides the reserve [bytes]."""
    memory = psutil.virtual_memory()
    reserve = max(_RESERVE, round(_RESERVE_SHARE * memory.total))
    return max(0, min(memory.available, _allowed()) - reserve)


def _allowed() -> int:
    """Return the memory that the control group of this process may still use [bytes]."""
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("memory.max", "memory.current"),
    }
    with contextlib.suppress(ClusterError, OSError, ValueError):
        version, folder = cgroups.own("memory")
        limit, used = (int((folder / name).read_text()) for name in names[version])
        return max(0, limit - used)
    return sys.maxsize  # version 2 writes "max" for no limit


class MemoryHogTool(Tool[MemorySize, HeldMemory]):
    """Holds memory on the node with a process that has touched all of it."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._process: subprocess.Popen[bytes] | None = None
        self._without = 0  # memory of the process before it holds any [bytes]

    async def start(self, args: MemorySize) -> HeldMemory:
        """Hold the memory.

        Raises:
            ClusterError: Too little is free, the tool holds memory already, or the process died.
        """
        if self._process is not None:
            raise ClusterError(f"memory is held for {self.site.subject} already")
        await asyncio.to_thread(self._hold, args.size)
        return await self.state()

    def _hold(self, size: int) -> None:
        free = free_memory()
        if size > free:
            raise ClusterError(
                f"size: {size / 1e6:.0f} MB must be at most {free / 1e6:.0f} MB, the memory that "
                "is free besides a reserve"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _HOLD, str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path("/"),
            start_new_session=True,
        )
        line = self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            self._release()
            raise ClusterError(f"the process that was to hold {size} bytes died")
        self._without = int(line) * os.sysconf("SC_PAGE_SIZE")

    async def state(self) -> HeldMemory:
        """Return the held and the free memory."""
        process = self._process
        if process is None:
            return HeldMemory(free=free_memory())
        rss = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.poll() is None:
                rss = max(0, psutil.Process(process.pid).memory_info().rss - self._without)
        return HeldMemory(pid=process.pid, rss=rss, free=free_memory())

    async def stop(self) -> None:
        """Free the memory."""
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
