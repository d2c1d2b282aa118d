"""Fault ``kill``: peers end without notice."""

from __future__ import annotations

import signal

from rayhive.faults.ending import EndsPeers
from rayhive.faults.kind import Proof, Record, Targets
from rayhive.faults.steps import SETTLE_S, all_are, end_processes, wait_for_states
from rayhive.faults.target import FaultTarget


class Kill(EndsPeers):
    """Sends SIGKILL to the process groups of all its targets at once."""

    about = "Kills all the processes of a peer at once (SIGKILL)."

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Send the signal."""
        self._hit = await end_processes(swarm, targets, signal.SIGKILL)
        return {"pids": self._hit}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check that no process of any target is left."""
        ok, left = True, {}
        for peer in targets:
            gone = all_are("gone", self._hit[peer])
            states = await wait_for_states(swarm, peer, gone, SETTLE_S)
            ok = ok and bool(self._hit[peer]) and gone(states)
            left[peer] = [pid for pid, state in states.items() if state != "gone"]
        return Proof(ok, {"left": left, "killed": sum(map(len, self._hit.values()))})
