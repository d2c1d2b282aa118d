"""Makes peers slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from rayhive.faults.kind import FaultKind, Group, Proof
from rayhive.faults.kinds._process import LOOK_S, leader_of, require_living, undo
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model
from rayhive.spec.fault_plan import PlannedFault

#: A peer that waits for others uses no CPU time, and the limit is not seen [s].
_PATIENCE_S = 8.0


class Args(Model):
    """Parameters of :class:`Straggler`.

    Attributes:
        cores: CPU time per second that all processes of the peer have together.
    """

    cores: float = Field(default=0.2, ge=0.02)


class Straggler(FaultKind):
    """A CPU quota on all the processes of each peer, until it is healed."""

    about: ClassVar[str] = "Slows a peer down by a quota of CPU time for all of its processes."
    group: ClassVar[Group] = "node"
    needs: ClassVar[tuple[str, ...]] = ("cpu_quota",)
    heals: ClassVar[bool] = True
    Args: ClassVar[type[Model]] = Args

    def __init__(self, planned: PlannedFault) -> None:
        super().__init__(planned)
        self._limited: dict[str, tuple[str, int]] = {}

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Set the quota."""
        require_living(swarm, who)
        self._limited = {peer: (swarm.node_of(peer), await leader_of(swarm, peer)) for peer in who}
        done = await asyncio.gather(
            *(
                swarm.agent(node, "limit_cpu", leader, self.args.cores)
                for node, leader in self._limited.values()
            )
        )
        self._began = dict(zip(who, (answer["stat"] for answer in done), strict=True))
        pids = {peer: answer["pids"] for peer, answer in zip(who, done, strict=True)}
        return {"cores": self.args.cores, "pids": pids}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """See that the kernel held the processes back."""
        seen = await asyncio.gather(*(self._look(swarm, peer) for peer in who))
        return Proof(all(each["throttled"] > 0 for each in seen), dict(zip(who, seen, strict=True)))

    async def _look(self, swarm: FaultTarget, peer: str) -> dict[str, float]:
        node, leader = self._limited[peer]
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            stat = await swarm.agent(node, "cpu_stat", leader)
            since = {key: value - self._began[peer][key] for key, value in stat.items()}
            if since["throttled"] > 0 or time.monotonic() >= deadline:
                return since
            await asyncio.sleep(LOOK_S)

    async def heal(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Take the quota away."""
        return {"failed": await self._unlimit(swarm)}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Take the quota away if it was never healed."""
        await self._unlimit(swarm)

    async def _unlimit(self, swarm: FaultTarget) -> dict[str, str]:
        limited, self._limited = self._limited, {}
        failed = {}
        for peer, (node, leader) in limited.items():
            error = await undo(swarm, node, "unlimit_cpu", leader)
            if error is not None:
                failed[peer] = error
        return failed
