"""What a node's agent does to the machine and to processes on it.

It touches the peers of its own runs only. A process belongs to a peer if the peer's record has
it with the same start time, or if it is in the session or group of the recorded leader: pids are
used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from rayhive.cluster.node import capabilities, leaks, process_group
from rayhive.cluster.node.cgroups import CpuLimit
from rayhive.cluster.node.leaks import Marks, tag
from rayhive.cluster.node.memory_hog import MemoryHog, free_memory
from rayhive.cluster.node.process_group import OwnedProcesses
from rayhive.cluster.node.small_disk import SmallDisk
from rayhive.errors import ClusterError

#: What psutil calls a process that a signal has stopped.
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class _Tool(Protocol):
    def release(self) -> None: ...


_T = TypeVar("_T", bound=_Tool)


class NodeTools:
    """Limits, burdens and signals what runs on a node.

    A peer's life is named by its leader, the pid that ``peer_spawned`` tells. What is done to
    the machine lasts until it is undone, the run is cleared, or the agent ends.
    """

    _runs: dict[str, Path]  # of the agent: the folder of each run on this node

    @functools.cached_property
    def _tools(self) -> dict[str, dict[tuple[int, type[_Tool]], _Tool]]:
        return {}

    @functools.cached_property
    def _marks(self) -> dict[str, Marks]:
        return {}

    async def signal_processes(
        self, run_id: str, leader: int, signum: int, pids: Sequence[int] | None = None
    ) -> list[int]:
        """Send a signal to a peer's processes.

        Args:
            run_id: The replicate.
            leader: The peer's leader.
            signum: The signal.
            pids: Which of its processes; None for all of them at once.

        Returns:
            The pids that got it; dead ones and those of somebody else are passed over.

        Raises:
            ClusterError: The run has no such peer on this node.
        """
        members = self._peer(run_id, leader).living()
        wanted = members if pids is None else [pid for pid in pids if pid in members]
        hit = set()
        if pids is None:
            hit.update(_signal_group(leader, signum, members))
        for pid in wanted:
            if pid not in hit:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
                    hit.add(pid)
        return sorted(hit)

    async def process_states(
        self, run_id: str, leader: int, pids: Sequence[int] | None = None
    ) -> dict[int, str]:
        """Return what has become of a peer's processes.

        Args:
            run_id: The replicate.
            leader: The peer's leader.
            pids: Which processes; None for all that the peer was ever seen to have.

        Returns:
            pid -> ``running``, ``stopped`` or ``gone``; a pid of somebody else is ``gone``.

        Raises:
            ClusterError: The run has no such peer on this node.
        """
        owned = self._peer(run_id, leader)
        living = set(owned.living())
        asked: Iterable[int] = living | owned.processes.keys() if pids is None else pids
        return {pid: _state(pid) if pid in living else "gone" for pid in sorted(asked)}

    async def limit_cpu(self, run_id: str, leader: int, cores: float) -> dict[str, Any]:
        """Give all the processes of a peer together no more than ``cores`` of CPU time.

        Returns:
            ``pids`` (those that were moved into the group) and its ``stat``.

        Raises:
            ClusterError: The machine can't, or the peer has a limit already.
        """
        owned = self._peer(run_id, leader)
        label = f"{tag(run_id)}-{leader}"
        limit = await self._make(run_id, leader, CpuLimit, lambda: CpuLimit(label, cores))
        moved: set[int] = set()
        while new := set(owned.living()) - moved:  # what they fork meanwhile, from outside
            moved |= new
            limit.add(new)
        return {"pids": limit.members(), "stat": limit.stat()}

    async def cpu_stat(self, run_id: str, leader: int) -> dict[str, float]:
        """Return periods, throttled periods and throttled time [s] of a limited peer."""
        return self._tool(run_id, leader, CpuLimit).stat()

    async def unlimit_cpu(self, run_id: str, leader: int) -> None:
        """Take the limit away, if there is one."""
        await self._drop(run_id, leader, CpuLimit)

    async def free_memory(self, run_id: str) -> int:
        """Return how much memory can be held [bytes]."""
        return free_memory()

    async def hold_memory(self, run_id: str, leader: int, size: int) -> dict[str, int]:
        """Hold ``size`` bytes in a process of its own, as long as the peer's run is here.

        Returns:
            The ``pid`` of the process and how much of it is in memory (``rss`` [bytes]).

        Raises:
            ClusterError: So much is not free, or some is held for the peer already.
        """
        memory_hog = await self._make(run_id, leader, MemoryHog, lambda: MemoryHog(size))
        return {"pid": memory_hog.pid, "rss": memory_hog.rss()}

    async def memory_held(self, run_id: str, leader: int) -> int:
        """Return how much of what is held is in memory [bytes]."""
        return self._tool(run_id, leader, MemoryHog).rss()

    async def release_memory(self, run_id: str, leader: int) -> None:
        """Give the memory back, if any is held."""
        await self._drop(run_id, leader, MemoryHog)

    async def mount_disk(self, run_id: str, leader: int, folder: str, size: int) -> str:
        """Mount a file system of ``size`` bytes over a folder in a peer's temporary directory.

        Returns:
            Its path.

        Raises:
            ClusterError: The machine can't, the peer has one already, or it has no such place.
        """
        temporary = self._peer(run_id, leader).folder
        if temporary is None or not Path(temporary).is_dir() or Path(folder).name != folder:
            raise ClusterError(f"the peer with the leader {leader} has no place for {folder!r}")
        path = Path(temporary) / folder
        await self._make(run_id, leader, SmallDisk, lambda: SmallDisk(path, size))
        return str(path)

    async def fill_disk(self, run_id: str, leader: int) -> int:
        """Fill the small file system of a peer; return the bytes written."""
        return await asyncio.to_thread(self._tool(run_id, leader, SmallDisk).fill)

    async def disk_state(self, run_id: str, leader: int) -> dict[str, int | str | None]:
        """Return ``free`` bytes of it and the name of the ``error`` that a write meets."""
        return self._tool(run_id, leader, SmallDisk).state()

    async def empty_disk(self, run_id: str, leader: int) -> None:
        """Make room on it again."""
        self._tool(run_id, leader, SmallDisk).empty()

    async def unmount_disk(self, run_id: str, leader: int) -> None:
        """Unmount it, if it is mounted."""
        await self._drop(run_id, leader, SmallDisk)

    async def capabilities(self, run_id: str | None = None) -> dict[str, str | None]:
        """Return for each capability None, or the reason why this node lacks it."""
        return dict(await asyncio.to_thread(capabilities.here))

    def release_tools(self, run_id: str) -> None:
        """Undo all that was done to the machine for a run, and note what its peers own.

        Before the run's folder is removed.
        """
        tools = self._tools.pop(run_id, {})
        for tool in tools.values():
            with contextlib.suppress(OSError):
                tool.release()
        folder = self._runs.get(run_id)
        if folder is not None:
            self._marks[run_id] = leaks.marks(run_id, folder)

    def release_all_tools(self) -> None:
        """Undo everything; the agent ends."""
        for run_id in list(self._tools):
            self.release_tools(run_id)

    async def orphans(self, run_id: str) -> list[str]:
        """Return what is left of a run after it was cleared, in words; answers once.

        Raises:
            ClusterError: The run was not cleared here: nobody knows what belonged to it.
        """
        marks = self._marks.pop(run_id, None)
        if marks is None:
            raise ClusterError(f"{run_id} was not cleared on this node")
        return await asyncio.to_thread(leaks.find, marks)

    async def _make(self, run_id: str, leader: int, kind: type[_T], make: Callable[[], _T]) -> _T:
        """Make a tool for a peer, unless it has one of the kind."""
        self._peer(run_id, leader)
        key = leader, kind
        if key in self._tools.get(run_id, {}):
            raise ClusterError(f"the peer with the leader {leader} has a {kind.__name__} already")
        tool = await asyncio.to_thread(make)
        if run_id not in self._runs or key in self._tools.get(run_id, {}):
            await asyncio.to_thread(tool.release)
            raise ClusterError(f"{run_id} was cleared, or another fault was faster")
        self._tools.setdefault(run_id, {})[key] = tool
        return tool

    async def _drop(self, run_id: str, leader: int, kind: type[_Tool]) -> None:
        tool = self._tools.get(run_id, {}).get((leader, kind))
        if tool is None:
            return
        try:
            await asyncio.to_thread(tool.release)
        except OSError as error:
            raise ClusterError(f"it can't be undone: {error}") from error
        self._tools.get(run_id, {}).pop((leader, kind), None)

    def _tool(self, run_id: str, leader: int, kind: type[_T]) -> _T:
        tool = self._tools.get(run_id, {}).get((leader, kind))
        if not isinstance(tool, kind):
            raise ClusterError(f"the peer with the leader {leader} has no {kind.__name__} here")
        return tool

    def _peer(self, run_id: str, leader: int) -> OwnedProcesses:
        folder = self._runs.get(run_id)
        if folder is not None:
            for _, owned in process_group.records(folder):
                if owned.leader == leader:
                    return owned
        raise ClusterError(f"no peer of {run_id} on this node has the leader {leader}")


def _signal_group(leader: int, signum: int, members: Sequence[int]) -> list[int]:
    """Signal the members that are in the leader's process group, in one go."""
    group = []
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == leader:
                group.append(pid)
    if group:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signum)
    return group


def _state(pid: int) -> str:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "stopped" if status in _STOPPED else "running"
