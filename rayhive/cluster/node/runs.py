"""Runs on this node: their folders, the processes of their peers, and the check for leaks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayhive.cluster.node import cgroups, process_group
from rayhive.cluster.node.process_group import OwnedProcesses
from rayhive.cluster.node.processes import pids, started
from rayhive.errors import ClusterError

#: Folder of the named network namespaces.
NAMESPACES = Path("/run/netns")


def tag(run_id: str) -> str:
    """Return the short name of a run, which the names of its kernel objects contain."""
    return hashlib.sha256(run_id.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Marks:
    """Resources of a run, as far as they can be told from others on the node.

    They are recorded before the cleanup, while the records of the peers exist, and looked for
    afterwards.

    Attributes:
        run_id: The run.
        folder: Its folder on the node.
        owned: Recorded processes and files of each of its peers.
    """

    run_id: str
    folder: Path
    owned: tuple[OwnedProcesses, ...]

    @classmethod
    def record(cls, run_id: str, folder: Path) -> Marks:
        """Record the resources of a run before its cleanup."""
        return cls(run_id, folder, tuple(owned for _, owned in process_group.records(folder)))

    def find(self) -> list[str]:
        """Return the remains of the run, one text each.

        They are processes, sockets, shared memory, mounts, control groups, network namespaces and
        the run's folder.
        """
        found = {*self._processes(), *self._files(), *self._kernel_objects()}
        found.update(f"mount {path}" for path in process_group.mounts_below(self.folder))
        if self.folder.exists():
            found.add(f"folder {self.folder}")
        return sorted(found)

    def _processes(self) -> Iterator[str]:
        """Yield living processes that were recorded, or whose environment names the run's folder.

        The environment of a process that was exec'd by a peer names the peer's temporary directory,
        even if the process left the peer's session.
        """
        known = {pid for owned in self.owned for pid in owned.living()}
        inside = f"={self.folder}/".encode()
        for pid in pids():
            with contextlib.suppress(OSError):
                entry = Path(f"/proc/{pid}")
                belongs = pid in known or inside in (entry / "environ").read_bytes()
                if belongs and pid != os.getpid() and started(pid) is not None:
                    yield f"process {pid} ({(entry / 'comm').read_text().strip()})"

    def _files(self) -> Iterator[str]:
        for owned in self.owned:
            sockets = owned.sockets_of(owned.processes)
            yield from (f"socket {path}" for path in sockets if path.exists())
            memory = process_group.memory_of(owned.processes)
            yield from (f"shared memory {path}" for path in memory)

    def _kernel_objects(self) -> Iterator[str]:
        name = tag(self.run_id)
        for path in cgroups.made_here():
            if f"-{name}-" in path.name:
                yield f"control group {path}"
        for path in NAMESPACES.glob(f"*{name}*"):
            yield f"network namespace {path.name}"


class Runs(dict[str, Path]):
    """The folder of each run on this node."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: dict[str, Marks] = {}

    def remove(self, run_id: str) -> Path | None:
        """Remove a run and record the resources that belong to it, before they are cleared.

        Returns:
            The run's folder; None if the run is not on this node.
        """
        folder = self.pop(run_id, None)
        if folder is not None:
            self._marks[run_id] = Marks.record(run_id, folder)
        return folder

    def peer(self, run_id: str, leader: int) -> OwnedProcesses:
        """Return the processes of a peer.

        Args:
            run_id: The run.
            leader: Pid of the peer's leader process, from its ``peer_spawned`` event.

        Raises:
            ClusterError: The run has no such peer on this node.
        """
        if run_id in self:
            for _, owned in process_group.records(self[run_id]):
                if owned.leader == leader:
                    return owned
        raise ClusterError(f"no peer of {run_id} on this node has the leader {leader}")

    async def remains(self, run_id: str) -> list[str]:
        """Return what remains of a removed run, one text each; can be asked once.

        Raises:
            ClusterError: The run was not removed here, so its resources are unknown.
        """
        marks = self._marks.pop(run_id, None)
        if marks is None:
            raise ClusterError(f"{run_id} was not cleared on this node")
        return await asyncio.to_thread(marks.find)
