"""Actor on each node: starts the forkserver, hosts the node's tools and clears up after runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rayhive.cluster import actors
from rayhive.cluster.actors import Once
from rayhive.cluster.node import machine, process_group
from rayhive.cluster.node.forkserver_manager import ForkserverManager, last_bytes
from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.notice_watch import NoticeWatch, Sources
from rayhive.cluster.node.notices.base import NodeNotice
from rayhive.cluster.node.runs import Runs
from rayhive.cluster.node.tools import Toolbox
from rayhive.crash_points import crash_point
from rayhive.faults.node_tools import Verb

log = logging.getLogger("rayhive.cluster")

_TICK = 15.0
#: Time without a replicate after which an agent ends with its forkserver [s].
_IDLE_S = 900.0


@dataclass(frozen=True)
class AgentOptions:
    """Settings of a new agent.

    Attributes:
        forkserver_command: Overrides rayhive's own forkserver.
        directory: Working directory; a new private directory if None.
    """

    forkserver_command: tuple[str, ...] | None = None
    directory: str | None = None


@dataclass(frozen=True)
class PreparedNode:
    """A node that is ready for peers of a replicate.

    Attributes:
        forkserver: Path of the forkserver's socket.
        temporary: Temporary directory of each peer.
        logs: Path of the log of each peer, for a replicate whose folder is on another node.
    """

    forkserver: str
    temporary: dict[str, str]
    logs: dict[str, str]


class NodeAgent:
    """Keeps a node's forkserver warm, hands out temporary directories and clears up after peers.

    An agent belongs to one study and one version of the code, so that no study runs code that
    another study imported. It outlives single replicates.

    Args:
        options: Its settings.
    """

    def __init__(self, options: AgentOptions) -> None:
        base = Path(machine.short_temporary_directory())
        process_group.clear_orphaned(base)
        prefix = f"{process_group.DIRECTORY_PREFIX}a-"
        if options.directory is not None:
            Path(options.directory).mkdir(exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix=prefix, dir=options.directory or base))
        process_group.claim(self._directory, os.getpid())
        self._forkserver = ForkserverManager(self._directory, options.forkserver_command)
        self._runs, self._link, self._notices = Runs(), NodeLink(), NoticeWatch()
        self._toolbox = Toolbox(self._runs, self._link)
        self._supervisors: dict[str, str] = {}
        self._used = time.monotonic()
        self._retiring = False
        self._ended = asyncio.Event()
        self._calls = Once()
        self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house())

    async def call(self, key: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call another method of the agent, once for each key.

        Args:
            key: The same when the call is repeated because it may not have arrived.
            method: Name of the method.
            args: Its arguments.
            kwargs: Its arguments by name.
        """
        step: Callable[..., Awaitable[Any]] = getattr(self, method)
        return await self._calls.do(key, lambda: step(*args, **kwargs))

    async def ping(self) -> None:
        """Answer, which shows that the node is there."""

    async def prepare(
        self, run_id: str, peers: Sequence[str], supervisor: str, sources: Sources = ()
    ) -> PreparedNode:
        """Prepare for peers of a replicate on this node.

        Args:
            run_id: The replicate.
            peers: Names of the peers that will run on this node.
            supervisor: Name of its supervisor.
            sources: Notice sources to watch from now on.

        Raises:
            PeerError: The forkserver does not start.
        """
        if run_id not in self._runs:
            await self._drop_orphaned_runs()
            if not self._runs:
                await self._toolbox.recover()
        if self._ended.is_set():
            raise RuntimeError("the agent is about to end")
        self._retiring = False
        self._used = time.monotonic()
        self._notices.add(sources)
        self._supervisors[run_id] = supervisor
        if run_id not in self._runs:
            # A short name, as the path of a unix socket has at most 107 bytes.
            self._runs[run_id] = Path(tempfile.mkdtemp(prefix="r", dir=self._directory))
        crash_point("node_prepared")
        folder = self._runs[run_id]
        temporary = {}
        for peer in peers:
            own = folder / peer.replace("peer-", "p").replace(".", "-")
            own.mkdir(exist_ok=True)
            temporary[peer] = str(own)
        logs = {peer: str(folder / f"{peer}.log") for peer in peers}
        return PreparedNode(await self._forkserver.ensure(), temporary, logs)

    async def notices(self, after: int, timeout: float) -> list[NodeNotice]:
        """See :meth:`rayhive.cluster.node.notice_watch.NoticeWatch.notices`."""
        return await self._notices.notices(after, timeout)

    # -- faults --------------------------------------------------------------------------------

    async def use_tool(
        self,
        run_id: str,
        name: str,
        subject: str,
        verb: Verb,
        args: Mapping[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """See :meth:`rayhive.cluster.node.tools.Toolbox.use`."""
        return await self._toolbox.use(run_id, name, subject, verb, args)

    async def signal_processes(
        self, run_id: str, leader: int, signum: int, pids: Sequence[int] | None = None
    ) -> list[int]:
        """Send a signal to a peer's processes, all of them if ``pids`` is None.

        Raises:
            ClusterError: The run has no peer with this leader on this node.
        """
        return self._runs.peer(run_id, leader).signal(signum, pids)

    async def process_states(
        self, run_id: str, leader: int, pids: Sequence[int] | None = None
    ) -> dict[int, str]:
        """Return the states of a peer's processes: ``running``, ``stopped`` or ``gone``.

        Raises:
            ClusterError: The run has no peer with this leader on this node.
        """
        return self._runs.peer(run_id, leader).states(pids)

    async def link_counters(self) -> dict[str, int]:
        """Return the bytes and packets that passed the node's data interface, and the drops."""
        return await self._link.counters()

    # -- the end of runs -----------------------------------------------------------------------

    async def cleanup(self, run_id: str) -> list[str]:
        """Undo faults of a run, kill its remaining processes and remove its remaining files."""
        crash_point("node_clearing")
        await self._toolbox.release(run_id)
        folder = self._runs.remove(run_id)
        self._supervisors.pop(run_id, None)
        self._used = time.monotonic()
        if folder is None:
            return []
        return await asyncio.to_thread(_clean, folder)

    async def orphans(self, run_id: str) -> list[str]:
        """Return what remains of a run after its cleanup; see :meth:`Runs.remains`."""
        return await self._runs.remains(run_id)

    async def fetch_log(self, run_id: str, peer: str) -> bytes:
        """Return the end of a peer's log that was written on this node."""
        return last_bytes(self._runs[run_id] / f"{peer}.log") if run_id in self._runs else b""

    async def retire(self) -> None:
        """Exit as soon as no replicate needs the agent.

        It needs no further call: a driver that died before that one would leave an agent behind
        that has ended, and keeps its name.
        """
        self._retiring = True
        await self._drop_orphaned_runs()
        if not self._runs:
            await self._exit()

    async def _keep_house(self) -> None:
        """Clear up after supervisors that died, and end after a long idle time."""
        while not self._ended.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _TICK)
                return
            await self._drop_orphaned_runs()
            idle = time.monotonic() - self._used > _IDLE_S
            if not self._runs and (idle or self._retiring):
                await self._exit()

    async def _drop_orphaned_runs(self) -> None:
        for run_id in list(self._runs):
            supervisor = self._supervisors.get(run_id, "")
            try:
                # one that lives clears up after its replicates, or exits
                if await asyncio.to_thread(actors.find, supervisor) is None:
                    await self.cleanup(run_id)
            except Exception:  # without an answer of Ray, the supervisor may live
                log.exception("the run %s is looked at again in %g s", run_id, _TICK)

    async def _exit(self) -> None:
        try:
            await self._end()
        finally:
            ray.get_runtime_context().current_actor.leave.remote()

    async def _end(self) -> None:
        self._ended.set()
        await self._notices.close()
        for run_id in list(self._runs):
            await self._toolbox.release(run_id)
        await self._forkserver.end()
        for run_id in list(self._runs):
            await self.cleanup(run_id)
        process_group.remove_tree(self._directory, process_group.OWNER_FILE)

    async def leave(self) -> None:
        """End the actor, with all of its processes and files gone."""
        if not self._ended.is_set():
            await self._end()
        actors.leave()


def _clean(folder: Path) -> list[str]:
    removed = process_group.clear_records(folder)
    process_group.remove_tree(folder)
    return removed
