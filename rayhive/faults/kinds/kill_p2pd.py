"""Fault ``kill_p2pd``: the network daemon of a peer ends."""

from __future__ import annotations

from rayhive.faults.ending import ChildProcessKill, EndsPeers
from rayhive.faults.kind import Proof, Record, Targets
from rayhive.faults.target import FaultTarget


class KillP2pd(EndsPeers):
    """Kills p2pd, which is never restarted."""

    about = "Kills the network daemon of a peer, which has to notice and end."
    of_swarm = True

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Send SIGKILL to the daemon."""
        self._kill = ChildProcessKill("p2pd")
        return await self._kill.inject(swarm, targets)

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check that the daemon is gone, and that its peer reported it and ended."""
        return await self._kill.verify(swarm, targets)
