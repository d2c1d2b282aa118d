"""The detached actor that owns a running replicate and outlives the driver.

A replicate begins with the one call that gives it to its supervisor. A driver that dies before
leaves an idle supervisor, and one that dies afterwards a replicate that the next driver finds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rayhive.cluster import actors
from rayhive.cluster.node.agent import AgentOptions
from rayhive.cluster.replicate.lifecycle import Replicate
from rayhive.cluster.replicate.peer_pool import PeerPool
from rayhive.cluster.replicate.peer_table import Outcome, ReplicateStatus
from rayhive.spec.replicate import ReplicateSpec

_LONGEST_POLL = 30.0
#: Time after which a supervisor exits although its outcome was not fetched [s].
_LINGER_S = 3600.0
#: Time without a replicate after which a supervisor exits [s].
_IDLE_S = 60.0


class _Held:
    """The replicate that a supervisor has."""

    def __init__(self, spec: ReplicateSpec, replicate: Replicate) -> None:
        self.spec, self.replicate = spec, replicate
        self.since = time.monotonic()
        self.finished, self.released = asyncio.Event(), asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, and its outcome was fetched."""
        return self.finished.is_set() and self.released.is_set()


class TrialSupervisor:
    """Supervisor of one replicate at a time: runs it and keeps its outcome until it is fetched.

    It takes another replicate of the study after one that left nothing behind, and exits otherwise.

    Args:
        agent_options: Settings of an agent that has to be created.
    """

    def __init__(self, agent_options: AgentOptions) -> None:
        self._agent_options = agent_options
        self._pool = PeerPool()
        self._held: _Held | None = None
        self._leaving = self._retiring = False
        self._news = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._keep_house())

    async def take(self, spec: Mapping[str, Any]) -> bool:
        """Begin a replicate, and return whether this supervisor has it. May be called again.

        Args:
            spec: The ReplicateSpec as a JSON object.
        """
        new, held = ReplicateSpec.model_validate(spec), self._held
        if held is not None and held.spec.run_id == new.run_id and held.spec.folder == new.folder:
            return True
        if self._leaving or self._retiring:
            return False
        if held is not None and not (held.finished.is_set() and held.replicate.left_nothing):
            return False
        # the outcome of the replicate before is on disk, fetched or not
        self._held = _Held(new, Replicate(new, self._agent_options, self._pool))
        self._task_of_held = asyncio.get_running_loop().create_task(self._run(self._held))
        return True

    async def _run(self, held: _Held) -> None:
        try:
            await held.replicate.run()
        finally:
            held.finished.set()
            self._news.set()

    async def _keep_house(self) -> None:
        """Exit after a replicate that left something behind, or after a long idle time."""
        while not self._leaving:
            self._news.clear()
            held = self._held
            if held is not None and not held.finished.is_set():
                await held.finished.wait()
                continue
            if held is not None and not held.released.is_set():
                patience = _LINGER_S
            elif self._retiring or (held is not None and not held.replicate.left_nothing):
                break
            else:
                patience = _IDLE_S
            try:
                await asyncio.wait_for(self._news.wait(), patience)
            except asyncio.TimeoutError:
                if self._held is held:
                    break
        self._leaving = True
        await self._pool.close()
        ray.get_runtime_context().current_actor.leave.remote()

    def _has(self, run_id: str) -> _Held | None:
        held = self._held
        return held if held is not None and held.spec.run_id == run_id else None

    async def describe(self) -> dict[str, Any] | None:
        """Return the spec of the replicate; None without one."""
        held = self._held
        if held is None or held.is_over:
            return None
        return held.spec.model_dump(mode="json", by_alias=True)

    async def since(self, run_id: str) -> float | None:
        """Return when a replicate was taken [s of the node's monotonic clock]; None if not here."""
        held = self._has(run_id)
        return None if held is None else held.since

    async def outcome(self, run_id: str, timeout: float) -> tuple[bool, Outcome | None]:
        """Return whether a replicate is here, and its outcome once it is on disk.

        Args:
            run_id: The replicate.
            timeout: Longest wait for its outcome [s].
        """
        held = self._has(run_id)
        if held is None:
            return False, None
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(held.finished.wait(), min(timeout, _LONGEST_POLL))
        return True, held.replicate.outcome

    async def status(self, run_id: str) -> ReplicateStatus | None:
        """Return the status of a replicate; None if it is not here."""
        held = self._has(run_id)
        return None if held is None else held.replicate.status()

    async def beside(self, run_ids: Sequence[str], new: str) -> None:
        """Take note of another replicate that uses the same nodes from now on.

        Args:
            run_ids: The replicates on those nodes.
            new: The other replicate.
        """
        for run_id in run_ids:
            if (held := self._has(run_id)) is not None:
                held.replicate.note_neighbours([new])

    async def stop(self, run_id: str, reason: str) -> None:
        """Ask for an early end of a replicate, which takes seconds."""
        if (held := self._has(run_id)) is not None:
            held.replicate.stop(reason)

    async def release(self, run_id: str) -> None:
        """Forget a replicate as soon as its outcome is on disk."""
        if (held := self._has(run_id)) is not None:
            held.released.set()
            self._news.set()

    async def retire(self) -> None:
        """Exit as soon as there is no replicate."""
        self._retiring = True
        self._news.set()

    async def leave(self) -> None:
        """End the actor; called by the actor itself."""
        actors.leave()
