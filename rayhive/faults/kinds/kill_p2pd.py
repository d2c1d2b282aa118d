"""Fault ``kill_p2pd``: the network daemon of a peer ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayhive.faults.ending import CHILD_S, ChildProcessKill, EndsPeers
from rayhive.faults.kind import Proof
from rayhive.faults.target import FaultTarget
from rayhive.spec.fault_plan import PlannedFault


class KillP2pd(EndsPeers):
    """Kills p2pd, which is never restarted."""

    about = "Kills the network daemon of a peer, which has to notice and end."
    patience_s = CHILD_S

    def __init__(self, planned: PlannedFault) -> None:
        super().__init__(planned)
        self._kill = ChildProcessKill("p2pd")

    async def inject(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """Send SIGKILL to the daemon."""
        return await self._kill.inject(swarm, targets)

    async def verify(self, swarm: FaultTarget, targets: Sequence[str]) -> Proof:
        """Check that the daemon is gone, and that its peer reported it and ended."""
        return await self._kill.verify(swarm, targets)
