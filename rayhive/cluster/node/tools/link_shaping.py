"""Tool ``link_shaping``: rate, delay and loss of a node's data link."""

from __future__ import annotations

from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.tools.base import Site, Tool
from rayhive.faults.node_tools import LinkChange, LinkState
from rayhive.spec import Link

#: Probe that measures each quantity of the link.
_PROBES = {"rate_mbit": "rate", "delay_ms": "rtt", "loss": "loss"}


class LinkShapingTool(Tool[LinkChange, LinkState]):
    """Changes quantities of the link; other quantities keep their values.

    Several faults may change one quantity at overlapping times: the last change counts.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._changed: set[str] = set()
        self._before: Link | None = None

    async def start(self, args: LinkChange) -> LinkState:
        """Change the link in both directions."""
        self._changed.update(args.model_dump(exclude_none=True))
        before = await self.site.link.change(args, self.site.name)
        self._before = self._before or before
        return LinkState(now=await self.site.link.now(), before=self._before)

    async def state(self) -> LinkState:
        """Return the setting; once started, also measure the changed quantities to the switch."""
        link = self.site.link
        if self._before is None:
            return LinkState(now=await link.now())
        measured = await link.measure(*(_PROBES[key] for key in sorted(self._changed)))
        return LinkState(now=await link.now(), before=self._before, measured=measured)

    async def stop(self) -> LinkState:
        """Undo the change."""
        now = await self.site.link.undo(self.site.name)
        self._changed, self._before = set(), None
        return LinkState(now=now)

    @classmethod
    async def recover(cls, link: NodeLink) -> None:
        """Restore the link, but for the changes that another living agent has made."""
        if link.exists:
            await link.restore()
