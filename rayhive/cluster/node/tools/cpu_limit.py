"""Tool ``cpu_limit``: a quota of CPU time on all processes of a peer together."""

from __future__ import annotations

import asyncio

from rayhive.cluster.node import cgroups
from rayhive.cluster.node.cgroups import CpuLimit
from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.tools.base import Site, Tool
from rayhive.errors import ClusterError
from rayhive.faults.node_tools import CpuQuota, CpuUsage


class CpuLimitTool(Tool[CpuQuota, CpuUsage]):
    """Moves the processes of a peer into a control group with a quota."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._limit: CpuLimit | None = None

    async def start(self, args: CpuQuota) -> CpuUsage:
        """Set the quota.

        Raises:
            ClusterError: The kernel refuses, or the peer has a quota already.
        """
        if self._limit is not None:
            raise ClusterError(f"the peer with the leader {self.site.subject} is limited already")
        owned = self.site.peer()
        self._limit = await asyncio.to_thread(CpuLimit, self.site.name, args.cores)
        moved: set[int] = set()
        while new := set(owned.living()) - moved:  # children that were forked meanwhile
            moved |= new
            self._limit.add(new)
        return await self.state()

    async def state(self) -> CpuUsage:
        """Return the members and counters of the control group.

        Raises:
            ClusterError: The peer has no quota.
        """
        if self._limit is None:
            raise ClusterError(f"the peer with the leader {self.site.subject} has no CPU limit")
        members = tuple(cgroups.members(self._limit.folder))
        return CpuUsage.model_validate({"pids": members, **self._limit.stat()})

    async def stop(self) -> None:
        """Remove the control group; the processes return to the group of the agent."""
        if self._limit is not None:
            await asyncio.to_thread(self._limit.release)
        self._limit = None

    @classmethod
    async def recover(cls, link: NodeLink) -> None:
        """Remove the control groups whose makers are dead."""
        await asyncio.to_thread(cgroups.remove_dead)
