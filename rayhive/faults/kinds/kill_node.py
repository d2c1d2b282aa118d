"""Fault ``kill_node``: whole nodes end."""

from __future__ import annotations

from rayhive.faults.ending import EndsNodes
from rayhive.faults.kind import Proof, Record, Targets
from rayhive.faults.target import FaultTarget


class KillNode(EndsNodes):
    """Ends the raylet of each node and all that runs there, at once and without notice."""

    about = "Ends a node of the testbed with all that runs on it."
    needs = ("node",)

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """End the nodes."""
        self._peers = {node: list(swarm.peers_on(node)) for node in targets}
        await self.end(swarm)
        return {"peers": self._peers}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check that the nodes' agents do not answer and that their peers are gone."""
        return await self.gone(swarm)
