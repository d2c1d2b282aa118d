"""Fault ``straggler``: a peer is slow."""

from __future__ import annotations

from rayhive.faults.kind import FaultKind, Proof, Record, Targets
from rayhive.faults.node_tools import CPU_LIMIT, CpuQuota, CpuUsage, ToolHandle
from rayhive.faults.steps import for_each, leader_of, poll, require_living, stop_all
from rayhive.faults.target import FaultTarget

#: Time limit for the quota to take effect [s]: a peer that waits for others uses no CPU time.
PATIENCE_S = 8.0
_COUNTERS = ("periods", "throttled", "throttled_s")


class Straggler(FaultKind):
    """Limits the CPU time of all processes of each peer, until it is healed."""

    about = "Slows a peer down by a quota of CPU time for all of its processes."
    group = "node"
    needs = ("cpu_quota",)
    heals = True
    args: CpuQuota
    tools: dict[str, ToolHandle[CpuQuota, CpuUsage]]

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Set the quota."""
        require_living(swarm, targets)
        self.tools = {
            peer: CPU_LIMIT.on(swarm, swarm.node_of(peer), await leader_of(swarm, peer))
            for peer in targets
        }
        self._began = await for_each(targets, lambda peer: self.tools[peer].start(self.args))
        pids = {peer: list(usage.pids) for peer, usage in self._began.items()}
        return {"cores": self.args.cores, "pids": pids}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check that the kernel throttled the processes."""
        seen = await for_each(targets, self._throttling)
        return Proof(all(each["throttled"] > 0 for each in seen.values()), seen)

    async def _throttling(self, peer: str) -> dict[str, float]:
        """Return the growth of the control group's counters since the injection."""
        before = self._began[peer]
        read = self.tools[peer].state
        after = await poll(read, lambda now: now.throttled > before.throttled, PATIENCE_S)
        return {key: getattr(after, key) - getattr(before, key) for key in _COUNTERS}

    async def heal(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Remove the quota."""
        return {"failed": await stop_all(self.tools)}
