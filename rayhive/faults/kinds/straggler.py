"""Fault ``straggler``: a peer is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from rayhive.faults.kind import FaultKind, Group, Proof
from rayhive.faults.kinds._process import leader_of, poll, require_living, stop_all
from rayhive.faults.node_tools import CPU_LIMIT, CpuQuota, CpuUsage, ToolHandle
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model
from rayhive.spec.fault_plan import PlannedFault

#: Time limit for the quota to take effect [s]: a peer that waits for others uses no CPU time.
_PATIENCE_S = 8.0
_COUNTERS = ("periods", "throttled", "throttled_s")


class Args(Model):
    """Parameters of :class:`Straggler`.

    Attributes:
        cores: CPU time that all processes of the peer get together [s/s].
    """

    cores: float = Field(default=0.2, ge=0.02)


class Straggler(FaultKind):
    """Limits the CPU time of all processes of each peer, until it is healed."""

    about: ClassVar[str] = "Slows a peer down by a quota of CPU time for all of its processes."
    group: ClassVar[Group] = "node"
    needs: ClassVar[tuple[str, ...]] = ("cpu_quota",)
    heals: ClassVar[bool] = True
    Args: ClassVar[type[Model]] = Args

    def __init__(self, planned: PlannedFault) -> None:
        super().__init__(planned)
        self._limits: dict[str, ToolHandle[CpuQuota, CpuUsage]] = {}
        self._began: dict[str, CpuUsage] = {}

    async def inject(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """Set the quota."""
        require_living(swarm, targets)
        self._limits = {
            peer: CPU_LIMIT.on(swarm, swarm.node_of(peer), await leader_of(swarm, peer))
            for peer in targets
        }
        quota = CpuQuota(cores=self.args.cores)
        began = await asyncio.gather(*(limit.start(quota) for limit in self._limits.values()))
        self._began = dict(zip(targets, began, strict=True))
        pids = {peer: list(usage.pids) for peer, usage in self._began.items()}
        return {"cores": self.args.cores, "pids": pids}

    async def verify(self, swarm: FaultTarget, targets: Sequence[str]) -> Proof:
        """Check that the kernel throttled the processes."""
        seen = await asyncio.gather(*(self._throttling(peer) for peer in targets))
        ok = all(each["throttled"] > 0 for each in seen)
        return Proof(ok, dict(zip(targets, seen, strict=True)))

    async def _throttling(self, peer: str) -> dict[str, float]:
        """Return the growth of the control group's counters since the injection."""
        before = self._began[peer]
        read = self._limits[peer].state
        after = await poll(read, lambda now: now.throttled > before.throttled, _PATIENCE_S)
        return {key: getattr(after, key) - getattr(before, key) for key in _COUNTERS}

    async def heal(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """Remove the quota."""
        limits, self._limits = self._limits, {}
        return {"failed": await stop_all(limits)}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Remove the quota if it was not healed."""
        await self.heal(swarm, ())
