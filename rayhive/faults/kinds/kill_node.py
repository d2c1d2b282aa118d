"""Ends whole nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from rayhive.faults.ground import Ground
from rayhive.faults.kind import Effect, FaultKind, Group, Proof
from rayhive.faults.kinds.common import nodes_gone, revive


class KillNode(FaultKind):
    """Ends the raylet of each node and all that runs there, at once and without a word."""

    about: ClassVar[str] = "Ends a node of the testbed with all that runs on it."
    group: ClassVar[Group] = "node"
    needs: ClassVar[tuple[str, ...]] = ("node",)
    targets: ClassVar[Literal["peer", "node"]] = "node"
    effect: ClassVar[Effect] = "gone"
    heals: ClassVar[bool] = True

    async def inject(self, ground: Ground, who: Sequence[str]) -> dict[str, Any]:
        """End them."""
        self._peers = {node: list(ground.peers_on(node)) for node in who}
        await asyncio.gather(*(ground.kill_node(node) for node in who))
        return {"peers": self._peers}

    async def verify(self, ground: Ground, who: Sequence[str]) -> Proof:
        """See that nobody answers there and that its peers are gone."""
        return await nodes_gone(ground, self._peers)

    async def heal(self, ground: Ground, who: Sequence[str]) -> dict[str, Any]:
        """Start the nodes, and on each the peers that it had."""
        return {"lives": await revive(ground, self._peers)}
