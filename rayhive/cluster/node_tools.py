"""What a node's agent does to the machine and to processes on it.

It touches the peers of its own runs only. A process belongs to a peer if the peer's record has
it with the same start time, or if it is in the session or group of the recorded leader: pids are
used again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from rayhive.cluster import belongings
from rayhive.cluster.belongings import Belongings
from rayhive.errors import ClusterError

#: What psutil calls a process that a signal has stopped.
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class NodeTools:
    """Limits, burdens and signals what runs on a node.

    A peer's life is named by its leader, the pid that ``peer_spawned`` tells.
    """

    _runs: dict[str, Path]  # of the agent: the folder of each run on this node

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

    def _peer(self, run_id: str, leader: int) -> Belongings:
        folder = self._runs.get(run_id)
        if folder is not None:
            for _, owned in belongings.records(folder):
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
