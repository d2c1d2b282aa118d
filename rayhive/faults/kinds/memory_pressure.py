"""Takes memory away from the peers of a node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from rayhive.config import Model
from rayhive.errors import RayhiveError
from rayhive.faults.ground import Ground
from rayhive.faults.kind import FaultKind, Group, Proof
from rayhive.faults.kinds.common import undo
from rayhive.plan import PlannedFault

#: What has to be in memory of what is held, for the fault to count.
_RESIDENT = 0.95
_MIB = 2**20


class Args(Model):
    """Parameters of :class:`MemoryPressure`.

    Attributes:
        mib: Memory to hold on each node [MiB].
    """

    mib: int = Field(default=256, ge=1)


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
        self._held: list[str] = []

    async def setup(self, ground: Ground) -> None:
        """See that the memory is there, on nodes that are known before training starts.

        Raises:
            RayhiveError: It is not.
        """
        for node in self.planned.who:
            if node.startswith("node-"):
                free = await ground.agent(node, "free_memory")
                if free < self.args.mib:
                    raise RayhiveError(
                        f"{self.args.mib} MiB can't be held on {node}: besides a reserve, "
                        f"{free} MiB are free"
                    )

    async def inject(self, ground: Ground, who: Sequence[str]) -> dict[str, Any]:
        """Hold the memory."""
        self._held = list(who)
        done = await asyncio.gather(
            *(ground.agent(node, "hold_memory", self.planned.id, self.args.mib) for node in who)
        )
        return {"mib": self.args.mib, "held": dict(zip(who, done, strict=True))}

    async def verify(self, ground: Ground, who: Sequence[str]) -> Proof:
        """See that it is resident."""
        seen = await asyncio.gather(
            *(ground.agent(node, "memory_held", self.planned.id) for node in who)
        )
        enough = _RESIDENT * self.args.mib * _MIB
        return Proof(
            all(held >= enough for held in seen), {"rss": dict(zip(who, seen, strict=True))}
        )

    async def heal(self, ground: Ground, who: Sequence[str]) -> dict[str, Any]:
        """Give it back."""
        return {"failed": await self._release(ground)}

    async def teardown(self, ground: Ground) -> None:
        """Give it back if it was never healed."""
        await self._release(ground)

    async def _release(self, ground: Ground) -> dict[str, str]:
        held, self._held = self._held, []
        failed = {}
        for node in held:
            error = await undo(ground, node, "release_memory", self.planned.id)
            if error is not None:
                failed[node] = error
        return failed
