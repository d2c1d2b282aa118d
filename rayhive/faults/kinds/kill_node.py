"""Ends whole nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rayhive.faults.kind import Proof
from rayhive.faults.kinds._process import EndsNodes, nodes_gone
from rayhive.faults.target import FaultTarget


class KillNode(EndsNodes):
    """Ends the raylet of each node and all that runs there, at once and without a word."""

    about: ClassVar[str] = "Ends a node of the testbed with all that runs on it."
    needs: ClassVar[tuple[str, ...]] = ("node",)

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """End them."""
        self._peers = {node: list(swarm.peers_on(node)) for node in who}
        await self.end(swarm)
        return {"peers": self._peers}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """See that nobody answers there and that its peers are gone."""
        return await nodes_gone(swarm, self._peers)
