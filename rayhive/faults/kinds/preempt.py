"""Fault ``preempt``: a provider reclaims peers like spot instances, after a notice."""

from __future__ import annotations

import logging

from pydantic import Field, model_validator

from rayhive.errors import RayhiveError
from rayhive.faults.ending import EndsPeers, Preemption, ReplacedArgs
from rayhive.faults.kind import Proof, Record, Targets
from rayhive.faults.steps import for_each, require_living
from rayhive.faults.target import FaultTarget

logger = logging.getLogger(__name__)


class PreemptArgs(ReplacedArgs):
    """Parameters of :class:`Preempt`.

    Attributes:
        notice_s: Time between the notice and SIGTERM [s]; 0 gives no notice.
        grace_s: Time between SIGTERM and SIGKILL [s].
        drain: Also announce to Ray that the peers' nodes will be gone at the deadline. Ray then
            starts nothing there any more, and replacements go elsewhere. At the end of the
            replicate the nodes of a testbed are restarted; elsewhere they stay drained.
    """

    notice_s: float = Field(default=15.0, ge=0)
    grace_s: float = Field(default=2.0, ge=0)
    drain: bool = False

    @model_validator(mode="after")
    def _elsewhere(self) -> PreemptArgs:
        if self.drain and self.where == "same":
            raise ValueError("drain needs where: other, as Ray starts nothing on a drained node")
        return self


class Preempt(EndsPeers):
    """Notifies each peer, sends SIGTERM at the deadline and SIGKILL after the grace period.

    The injection is the notice: it returns when it has been sent to every peer. The proof waits
    for the end of the peers, which comes at the deadline plus ``grace_s`` at the latest.
    """

    about = "Tells a peer that it will be taken away, and does it at the deadline."
    args: PreemptArgs

    _drained: frozenset[str] = frozenset()

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Give the notice."""
        require_living(swarm, targets)
        self._preemption = Preemption(swarm, targets, self.args.notice_s, self.args.grace_s)
        await self._preemption.give_notice()
        return {"notice_s": self.args.notice_s, "drained": await self._drain(swarm, targets)}

    async def _drain(self, swarm: FaultTarget, targets: Targets) -> dict[str, str | None]:
        """Return None for each node that was drained, or the cluster's reason for a refusal."""
        drained: dict[str, str | None] = {}
        for node in {swarm.node_of(peer): None for peer in targets} if self.args.drain else ():
            self._drained |= {node}  # also if this is cut off half way
            try:
                await swarm.drain(node, self.args.notice_s)
                drained[node] = None
            except RayhiveError as error:
                self._drained -= {node}
                drained[node] = str(error)
        return drained

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Wait for the end of each peer, enforce it, and check that nothing is left."""
        seen = await self._preemption.end()
        ok = all(each["gone"] and each["noticed"] is not False for each in seen.values())
        return Proof(ok, seen)

    async def teardown(self, swarm: FaultTarget) -> None:
        """Restart the nodes that Ray drained: only a new node takes the next replicate's peers."""

        async def restart(node: str) -> None:
            try:
                await swarm.kill_node(node)
            except RayhiveError as error:
                logger.warning(f"{node} stays drained: {error}")
            else:
                await swarm.start_node(node)

        await for_each(sorted(self._drained), restart)
        await super().teardown(swarm)
