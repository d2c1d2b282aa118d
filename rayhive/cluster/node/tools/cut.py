"""Tool ``cut``: packets between the node and others are dropped on the data plane."""

from __future__ import annotations

import asyncio

from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.tools.base import Site, Tool
from rayhive.faults.node_tools import CutArgs, CutState


class CutTool(Tool[CutArgs, CutState]):
    """Cuts the node from all others except the kept ones, established connections included."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._cut_from: tuple[str, ...] = ()
        self._keep: tuple[str, ...] = ()

    async def start(self, args: CutArgs) -> CutState:
        """Cut; a cut for the same subject is replaced."""
        self._keep = args.keep
        cut_from = await self.site.link.cut(self.site.name, args.keep, args.direction)
        self._cut_from = tuple(cut_from)
        return CutState(address=await self.site.link.address(), cut_from=self._cut_from)

    async def state(self) -> CutState:
        """Return the node's address; once started, also probe the cut and the kept addresses."""
        link = self.site.link
        own = await link.address()
        others = [*self._cut_from, *(a for a in self._keep if a != own)]
        found = await asyncio.gather(*(link.reach(address) for address in others))
        arrived = dict(zip(others, found, strict=True))
        return CutState(address=own, cut_from=self._cut_from, arrived=arrived)

    async def stop(self) -> CutState:
        """Mend the cut; the state has the number of dropped packets."""
        dropped = await self.site.link.mend(self.site.name)
        self._cut_from = self._keep = ()
        return CutState(address=await self.site.link.address(), dropped=dropped)

    @classmethod
    async def recover(cls, link: NodeLink) -> None:
        """Mend every cut of the node that no other living agent has made."""
        if link.exists:
            await link.mend_left()
