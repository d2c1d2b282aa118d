"""Some nodes can't reach others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Literal

from rayhive.errors import RayhiveError
from rayhive.faults.kind import FaultKind, Proof
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model


class PartitionArgs(Model):
    """Parameters.

    Attributes:
        mode: ``full`` cuts each of the nodes from all others, ``one-way`` does so in one
            direction, ``halves`` parts the nodes together from all the rest.
        direction: Of a one-way cut: ``out`` for what the nodes send, ``in`` for what they get.
    """

    mode: Literal["full", "one-way", "halves"] = "full"
    direction: Literal["out", "in"] = "out"


class Partition(FaultKind):
    """Cuts nodes from others between their data addresses; Ray's own traffic goes on."""

    about = "Nodes can't reach others: at all, in one direction, or across two halves."
    group = "link"
    needs = ("link",)
    targets = "node"
    effect = "cut_off"
    heals = True
    Args = PartitionArgs

    #: What each node was cut from; of those that are not healed yet.
    _cuts: dict[str, list[str]]
    _keep: list[str]

    async def setup(self, swarm: FaultTarget) -> None:
        """Touch nothing."""
        self._cuts, self._keep = {}, []

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Cut.

        Raises:
            RayhiveError: There is nobody to be cut from.
        """
        own = {node: str(await swarm.agent(node, "data_address")) for node in who}
        self._keep = list(own.values()) if self.args.mode == "halves" else []
        for node in who:
            self._cuts[node] = []
            given = (self.planned.id, self._keep, self._direction)
            self._cuts[node] = list(await swarm.agent(node, "cut", *given))
        if not all(self._cuts.values()):
            raise RayhiveError("there is no node that these could be cut from")
        return {"cut_from": dict(self._cuts), "direction": self._direction}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """Send packets both ways between each node and each that it was cut from, or kept."""
        own = {node: await swarm.agent(node, "data_address") for node in who}
        steps = [(node, other) for node in who for other in self._cuts.get(node, ())]
        kept = [(node, other) for node in who for other in self._keep if other != own[node]]
        every = [*steps, *kept]
        found = await asyncio.gather(*(swarm.agent(node, "reach", to) for node, to in every))
        seen = {f"{node} {to}": each for (node, to), each in zip(every, found, strict=True)}
        cut = [self._as_cut(each) for each in found[: len(steps)]]
        spared = [each["out"] > 0 and each["in"] > 0 for each in found[len(steps) :]]
        return Proof(bool(cut) and all(cut) and all(spared), {"arrived": seen})

    async def heal(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Mend."""
        dropped = {}
        for node in who:
            dropped[node] = await swarm.agent(node, "mend", self.planned.id)
            self._cuts.pop(node, None)
        return {"dropped_packets": dropped}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Mend what was not healed; the cuts of a node that is gone went with it."""
        for node in list(getattr(self, "_cuts", {})):
            with contextlib.suppress(RayhiveError):
                await self.heal(swarm, [node])

    @property
    def _direction(self) -> str:
        return str(self.args.direction) if self.args.mode == "one-way" else "both"

    def _as_cut(self, arrived: dict[str, Any]) -> bool:
        """Return whether packets arrived in the directions that are open, and in no other."""
        cut = ("out", "in") if self._direction == "both" else (self._direction,)
        return all((arrived[way] == 0) == (way in cut) for way in ("out", "in"))
