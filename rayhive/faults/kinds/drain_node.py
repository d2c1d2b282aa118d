"""Fault ``drain_node``: a provider reclaims whole nodes, after a notice."""

from __future__ import annotations

from pydantic import Field

from rayhive.faults.ending import EndsNodes, Preemption
from rayhive.faults.kind import Proof, Record, Targets
from rayhive.faults.steps import for_each
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model


class DrainNodeArgs(Model):
    """Parameters of :class:`DrainNode`.

    Attributes:
        notice_s: Time between the notice and the end of the node [s].
        grace_s: Time between SIGTERM to its peers and SIGKILL [s].
    """

    notice_s: float = Field(default=15.0, ge=0)
    grace_s: float = Field(default=2.0, ge=0)


class DrainNode(EndsNodes):
    """Drains each node with a deadline, notifies its peers, and ends it at the deadline.

    Ray starts nothing on a drained node, but lets its processes run past the deadline, so the node
    is ended here. The injection is the notice; the proof waits for the end.
    """

    about = "Announces that a node will be taken away, and does it at the deadline."
    needs = ("node", "drain", "signals")
    args: DrainNodeArgs

    _drained = False

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Give the notice to Ray and to the peers."""
        self._peers = {node: list(swarm.peers_on(node)) for node in targets}
        peers = [peer for on_node in self._peers.values() for peer in on_node]
        self._preemption = Preemption(swarm, peers, self.args.notice_s, self.args.grace_s)
        self._drained = True
        await for_each(targets, lambda node: swarm.drain(node, self.args.notice_s))
        await self._preemption.give_notice()
        return {"notice_s": self.args.notice_s, "peers": self._peers}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Wait for the end of the peers, end the nodes, and check that no agent answers there."""
        seen = await self._preemption.end()
        await self._preemption.wait_for_deadline()
        await self.end(swarm)
        self._drained = False
        gone = await self.gone(swarm)
        noticed = all(each["noticed"] is not False for each in seen.values())
        return Proof(gone.ok and noticed, {**gone.what, "peers": seen})

    async def teardown(self, swarm: FaultTarget) -> None:
        """Start the nodes that are down, and restart nodes that are still drained."""
        if self._drained:
            await self.end(swarm)
        await super().teardown(swarm)
