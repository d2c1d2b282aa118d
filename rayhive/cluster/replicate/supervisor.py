"""The detached actor that owns one running replicate and outlives the driver.

The replicate starts with the actor and not by a call of the driver. A driver that died between the
two would leave an actor that waits forever, and the next driver would adopt it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import ray

from rayhive.cluster import actors
from rayhive.cluster.node.agent import AgentOptions
from rayhive.cluster.replicate.lifecycle import Replicate
from rayhive.cluster.replicate.peer_table import Outcome, ReplicateStatus
from rayhive.spec.replicate import ReplicateSpec

_LONGEST_POLL = 30.0
#: Time after which a supervisor exits although its outcome was not fetched [s].
_LINGER_S = 3600.0


class TrialSupervisor:
    """Supervisor of one replicate: runs it and keeps its outcome until it is fetched.

    Args:
        spec: The ReplicateSpec as a JSON object.
        agent_options: Settings of an agent that has to be created.
    """

    def __init__(self, spec: Mapping[str, Any], agent_options: AgentOptions) -> None:
        self._spec = ReplicateSpec.model_validate(spec)
        self._replicate = Replicate(self._spec, agent_options)
        self._finished = asyncio.Event()
        self._released = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        await self._replicate.run()
        self._finished.set()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._released.wait(), _LINGER_S)
        ray.get_runtime_context().current_actor.leave.remote()

    async def describe(self) -> dict[str, Any]:
        """Return the spec of the replicate."""
        return self._spec.model_dump(mode="json", by_alias=True)

    async def outcome(self, timeout: float) -> Outcome | None:
        """Return the outcome once it is on disk; None after ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._finished.wait(), min(timeout, _LONGEST_POLL))
        except asyncio.TimeoutError:
            return None
        return self._replicate.outcome

    async def status(self) -> ReplicateStatus:
        """Return the status of the replicate."""
        return self._replicate.status()

    async def beside(self, run_id: str) -> None:
        """Take note of another replicate that uses the same nodes from now on."""
        self._replicate.note_neighbours([run_id])

    async def stop(self, reason: str) -> None:
        """Ask for an early end of the replicate, which takes seconds."""
        self._replicate.stop(reason)

    async def release(self) -> None:
        """End the actor as soon as the outcome is on disk."""
        self._released.set()

    async def leave(self) -> None:
        """End the actor; called by the actor itself."""
        actors.leave()
