"""Tool ``flapping``: the node's data link is cut for a while, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Literal

from rayhive.cluster.node.tools.base import Site, Tool
from rayhive.errors import ClusterError
from rayhive.faults.node_tools import FlapArgs, FlapPhase, FlapState

_PHASES: tuple[Literal["down", "up"], ...] = ("down", "up")
#: Packets with which each phase is probed.
_PROBES = 5


class FlappingTool(Tool[FlapArgs, FlapState]):
    """Cuts and mends the link in the background, and probes the other nodes in each phase.

    One of them may be cut itself, so that a single one would not tell whether this link is up.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._phases: list[FlapPhase] = []
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, args: FlapArgs) -> FlapState:
        """Begin with a cut."""
        await self._settle()
        others = await self.site.link.neighbours()
        self._phases, self._ended = [], asyncio.Event()
        self._task = asyncio.create_task(self._flap(args, others))
        return await self.state()

    async def state(self) -> FlapState:
        """Return the phases so far."""
        return FlapState(phases=tuple(self._phases))

    async def stop(self) -> FlapState:
        """End the flapping with the link up."""
        await self._settle()
        return await self.state()

    async def _settle(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            self._ended.set()
            with contextlib.suppress(ClusterError):
                await task
        await self.site.link.mend(self.site.name)

    async def _probe(self, others: Sequence[str], patience_s: float) -> dict[str, int]:
        """Return the packets to and from all other nodes together."""
        link = self.site.link
        found = await asyncio.gather(*(link.reach(other, _PROBES, patience_s) for other in others))
        if not found:
            return {}
        sent, out = sum(each.sent for each in found), sum(each.out for each in found)
        return {"sent": sent, "out": out, "back": sum(each.back for each in found)}

    async def _flap(self, args: FlapArgs, others: Sequence[str]) -> None:
        link, name = self.site.link, self.site.name
        for _ in itertools.count() if args.times is None else range(args.times):
            for phase, seconds in zip(_PHASES, (args.down_s, args.up_s), strict=True):
                at, end = time.time(), time.monotonic() + seconds
                await (link.cut(name) if phase == "down" else link.mend(name))
                probe = await self._probe(others, min(1.0, seconds / 2))
                self._phases.append(FlapPhase(phase=phase, at=at, **probe))
                with contextlib.suppress(asyncio.TimeoutError):
                    left = max(0.0, end - time.monotonic())
                    await asyncio.wait_for(self._ended.wait(), left)
                if self._ended.is_set():
                    return
