"""Signals to the processes of peers on this node, and their states.

Only the peers of the agent's own runs are reached. A process belongs to a peer if the peer's record
names it with the same start time, or if it is in the session or process group of the recorded
leader; the kernel reuses pids.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence

import psutil

from rayhive.cluster.node.process_group import OwnedProcesses

#: States of psutil for a process that a signal has stopped.
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def signal_processes(
    owned: OwnedProcesses, signum: int, pids: Sequence[int] | None = None
) -> list[int]:
    """Send a signal to a peer's processes.

    Args:
        owned: The peer's processes.
        signum: The signal.
        pids: Processes to signal; None for all at once.

    Returns:
        The pids that got the signal. Dead processes and processes of other owners are left out.
    """
    members = owned.living()
    wanted = members if pids is None else [pid for pid in pids if pid in members]
    hit = set()
    if pids is None:
        hit.update(_signal_group(owned.leader, signum, members))
    for pid in wanted:
        if pid not in hit:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
                hit.add(pid)
    return sorted(hit)


def process_states(owned: OwnedProcesses, pids: Sequence[int] | None = None) -> dict[int, str]:
    """Return the states of a peer's processes.

    Args:
        owned: The peer's processes.
        pids: Processes to check; None for all that the peer was ever seen to have.

    Returns:
        pid -> ``running``, ``stopped`` or ``gone``; a pid of another owner is ``gone``.
    """
    living = set(owned.living())
    asked: Iterable[int] = living | owned.processes.keys() if pids is None else pids
    return {pid: _state(pid) if pid in living else "gone" for pid in sorted(asked)}


def _signal_group(leader: int, signum: int, members: Sequence[int]) -> list[int]:
    """Signal the members in the leader's process group with one call; return them."""
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
