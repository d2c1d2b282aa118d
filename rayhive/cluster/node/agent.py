"""The actor on each node that does what is done to processes from outside."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from rayhive.cluster import actors
from rayhive.cluster.calls import Once
from rayhive.cluster.node import cgroups, machine, process_group
from rayhive.cluster.node.forkserver_manager import ForkserverManager, tail
from rayhive.cluster.node.link_faults import LinkTools
from rayhive.cluster.node.process_faults import NodeTools

_TICK = 15.0
_LOG_LIMIT = 8 * 2**20


class NodeAgent(NodeTools, LinkTools):
    """Keeps a node's forkserver warm, hands out temporary directories and clears up after peers.

    An agent belongs to one study and one version of the code, so that no study runs code that
    another one imported, and outlives single replicates.

    Args:
        forkserver_command: Overrides rayhive's own forkserver.
        directory: Where to work; a new private directory if None.
        idle: Seconds without a replicate after which the agent goes.
    """

    def __init__(
        self,
        forkserver_command: Sequence[str] | None = None,
        directory: str | None = None,
        idle: float = 900.0,
    ) -> None:
        base = Path(machine.short_temporary_directory())
        cgroups.remove_dead()
        for orphan in process_group.orphaned(base):
            process_group.clear(orphan, patience=0.0)
        prefix = f"{process_group.DIRECTORY_PREFIX}a-"
        if directory is not None:
            Path(directory).mkdir(exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix=prefix, dir=directory or base))
        process_group.claim(self._directory, os.getpid())
        self._forkserver = ForkserverManager(self._directory, forkserver_command)
        self._runs: dict[str, Path] = {}
        self._idle = idle
        self._used = time.monotonic()
        self._retiring = False
        self._ended = asyncio.Event()
        self._calls = Once()
        self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house())

    async def call(self, key: str, method: str, *args: Any) -> Any:
        """Call another method of the agent, once for each key.

        Args:
            key: The same when the call is repeated because it may not have arrived.
            method: Name of the method.
            args: Its arguments.
        """

        async def step() -> Any:
            found = getattr(self, method)(*args)
            return await found if inspect.isawaitable(found) else found

        return await self._calls.do(key, step)

    async def ping(self) -> None:
        """Answer: the node is there."""

    async def prepare(self, run_id: str, peers: Sequence[str]) -> dict[str, Any]:
        """Get ready for peers of a replicate on this node.

        Args:
            run_id: The replicate; its supervisor has the same name.
            peers: Names of the peers that come to this node.

        Returns:
            ``forkserver`` (its socket), ``temporary`` (a directory for each peer), ``logs`` (where
            their logs may go if the replicate's folder is on another node) and ``facts``.

        Raises:
            PeerError: The forkserver does not start.
        """
        if run_id not in self._runs:
            await self._drop_orphaned_runs()
            if not self._runs:  # a supervisor that died has healed nothing
                await self.heal_link()
        if self._ended.is_set():
            raise RuntimeError("the agent is on its way out")
        self._retiring = False
        self._used = time.monotonic()
        folder = self._runs.get(run_id)
        if folder is None:
            # A short name: unix sockets below it have at most 107 bytes of path.
            folder = Path(tempfile.mkdtemp(prefix="r", dir=self._directory))
            self._runs[run_id] = folder
        temporary = {}
        for peer in peers:
            own = folder / peer.replace("peer-", "p").replace(".", "-")
            own.mkdir(exist_ok=True)
            temporary[peer] = str(own)
        return {
            "forkserver": await self._forkserver.ensure(),
            "temporary": temporary,
            "logs": {peer: str(folder / f"{peer}.log") for peer in peers},
            "facts": machine.facts(),
        }

    async def cleanup(self, run_id: str) -> list[str]:
        """Kill what still lives of a replicate on this node and remove what it left."""
        self.release_tools(run_id)
        folder = self._runs.pop(run_id, None)
        self._used = time.monotonic()
        if folder is None:
            return []
        return await asyncio.to_thread(_clean, folder)

    async def fetch_log(self, run_id: str, peer: str) -> bytes:
        """Return the end of a peer's log that was written on this node."""
        folder = self._runs.get(run_id)
        if folder is None:
            return b""
        with contextlib.suppress(OSError), (folder / f"{peer}.log").open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _LOG_LIMIT))
            return file.read()
        return b""

    async def describe(self) -> dict[str, Any]:
        """Return facts about the node and the agent's state."""
        return {
            **machine.facts(),
            "forkserver": self._forkserver.pid,
            "forkserver_log": tail(self._forkserver.log),
            "runs": sorted(self._runs),
            "directory": str(self._directory),
        }

    async def retire(self) -> bool:
        """Go as soon as no replicate needs the agent; return whether that is now."""
        self._retiring = True
        await self._drop_orphaned_runs()
        if self._runs:
            return False
        await self._end()
        return True

    async def _keep_house(self) -> None:
        """Clear up after supervisors that died, and go when nobody came for long."""
        while not self._ended.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _TICK)
                return
            await self._drop_orphaned_runs()
            idle = time.monotonic() - self._used > self._idle
            if not self._runs and (idle or self._retiring):
                await self._end()
                me = ray.get_runtime_context().current_actor
                me.leave.remote()

    async def _drop_orphaned_runs(self) -> None:
        for run_id in list(self._runs):
            if not await asyncio.to_thread(_supervised, run_id):
                await self.cleanup(run_id)

    async def _end(self) -> None:
        self._ended.set()
        self.release_all_tools()
        await self._forkserver.end()
        for run_id in list(self._runs):
            await self.cleanup(run_id)
        process_group.remove_tree(self._directory, process_group.OWNER_FILE)

    async def leave(self) -> None:
        """End the actor; everything of it is gone by then."""
        if not self._ended.is_set():
            await self._end()
        actors.leave()


def _supervised(run_id: str) -> bool:
    try:
        ray.get_actor(run_id)
    except ValueError:
        return False
    return True


def _clean(folder: Path) -> list[str]:
    owners = [owned for _, owned in process_group.records(folder)]
    for owned in owners:
        owned.kill()
    deadline = time.monotonic() + 5.0
    while any(owned.living() for owned in owners) and time.monotonic() < deadline:
        time.sleep(0.02)  # they are not our children: nothing tells when a group is gone
    removed = [path for owned in owners for path in owned.remove()]
    process_group.remove_tree(folder)
    return removed
