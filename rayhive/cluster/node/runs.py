"""Runs on this node: their folders, the processes of their peers, and the check for leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from rayhive.cluster.node import leaks, process_group
from rayhive.cluster.node.leaks import Marks
from rayhive.cluster.node.process_group import OwnedProcesses
from rayhive.errors import ClusterError


class Runs:
    """The runs on this node, each with its folder."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}
        self._marks: dict[str, Marks] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._folders))

    def __contains__(self, run_id: object) -> bool:
        return run_id in self._folders

    def __len__(self) -> int:
        return len(self._folders)

    def add(self, run_id: str, folder: Path) -> None:
        """Add a run."""
        self._folders[run_id] = folder

    def folder(self, run_id: str) -> Path | None:
        """Return the folder of a run; None if the run is not on this node."""
        return self._folders.get(run_id)

    def remove(self, run_id: str) -> Path | None:
        """Remove a run and record the resources that belong to it, before they are cleared.

        Returns:
            The run's folder; None if the run is not on this node.
        """
        folder = self._folders.pop(run_id, None)
        if folder is not None:
            self._marks[run_id] = leaks.marks(run_id, folder)
        return folder

    def peer(self, run_id: str, leader: int) -> OwnedProcesses:
        """Return the processes of a peer.

        Args:
            run_id: The run.
            leader: Pid of the peer's leader process, from its ``peer_spawned`` event.

        Raises:
            ClusterError: The run has no such peer on this node.
        """
        folder = self._folders.get(run_id)
        if folder is not None:
            for _, owned in process_group.records(folder):
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
        return await asyncio.to_thread(leaks.find, marks)
