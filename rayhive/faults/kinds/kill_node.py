"""Fault ``kill_node``: whole nodes end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rayhive.faults.kind import Proof
from rayhive.faults.kinds._process import EndsNodes, nodes_gone
from rayhive.faults.target import FaultTarget


class KillNode(EndsNodes):
    """Ends the raylet of each node and all that runs there, at once and without notice."""

    about: ClassVar[str] = "Ends a node of the testbed with all that runs on it."
    needs: ClassVar[tuple[str, ...]] = ("node",)

    async def inject(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """End the nodes."""
        self._peers = {node: list(swarm.peers_on(node)) for node in targets}
        await self.end(swarm)
        return {"peers": self._peers}

    async def verify(self, swarm: FaultTarget, targets: Sequence[str]) -> Proof:
        """Check that the nodes' agents do not answer and that their peers are gone."""
        return await nodes_gone(swarm, self._peers)
