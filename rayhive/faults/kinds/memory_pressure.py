"""Takes memory away from the peers of a node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from rayhive.errors import RayhiveError
from rayhive.faults.kind import FaultKind, Group, Proof
from rayhive.faults.kinds._process import leader_of, undo
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model
from rayhive.spec.fault_plan import PlannedFault

#: What has to be in memory of what is held, for the fault to count.
_RESIDENT = 0.95
_MB = 10**6


class Args(Model):
    """Parameters of :class:`MemoryPressure`.

    Attributes:
        megabytes: Memory to hold on each node [MB].
    """

    megabytes: int = Field(default=256, ge=1)


class MemoryPressure(FaultKind):
    """A process on the node holds memory and has touched all of it, until it is healed.

    Never so much that the node keeps no reserve: a machine that swaps or kills at random would
    not break what the plan says.
    """

    about: ClassVar[str] = "Holds memory on a node, within what is free besides a reserve."
    group: ClassVar[Group] = "node"
    needs: ClassVar[tuple[str, ...]] = ("memory",)
    targets: ClassVar[Literal["peer", "node"]] = "node"
    heals: ClassVar[bool] = True
    Args: ClassVar[type[Model]] = Args

    def __init__(self, planned: PlannedFault) -> None:
        super().__init__(planned)
        self._held: dict[str, int] = {}

    async def setup(self, swarm: FaultTarget) -> None:
        """See that the memory is there, on nodes that are known before training starts.

        Raises:
            RayhiveError: It is not.
        """
        for node in self.planned.who:
            if node.startswith("node-"):
                free = await swarm.agent(node, "free_memory") // _MB
                if free < self.args.megabytes:
                    raise RayhiveError(
                        f"{self.args.megabytes} MB can't be held on {node}: besides a reserve, "
                        f"{free} MB are free"
                    )

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Hold the memory, for as long as the run of a peer there lasts at most."""
        for node in who:
            peers = swarm.peers_on(node)
            if not peers:
                raise RayhiveError(f"no peer lives on {node}")
            self._held[node] = await leader_of(swarm, peers[0])
        size = self.args.megabytes * _MB
        done = await asyncio.gather(
            *(swarm.agent(node, "hold_memory", self._held[node], size) for node in who)
        )
        return {"held": dict(zip(who, done, strict=True))}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """See that it is resident."""
        seen = await asyncio.gather(
            *(swarm.agent(node, "memory_held", self._held[node]) for node in who)
        )
        enough = _RESIDENT * self.args.megabytes * _MB
        rss = dict(zip(who, seen, strict=True))
        return Proof(all(held >= enough for held in seen), {"rss": rss})

    async def heal(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Give it back."""
        return {"failed": await self._release(swarm)}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Give it back if it was never healed."""
        await self._release(swarm)

    async def _release(self, swarm: FaultTarget) -> dict[str, str]:
        held, self._held = self._held, {}
        failed = {}
        for node, leader in held.items():
            error = await undo(swarm, node, "release_memory", leader)
            if error is not None:
                failed[node] = error
        return failed
