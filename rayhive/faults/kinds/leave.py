"""Fault ``leave``: peers leave the swarm in an orderly way."""

from __future__ import annotations

from rayhive.events import Left
from rayhive.faults.ending import EndsPeers, handed_over
from rayhive.faults.kind import Proof, Record, Targets
from rayhive.faults.steps import Listening, all_are, for_each, require_living, wait_for_states
from rayhive.faults.target import FaultTarget
from rayhive.spec.commands import Leave as LeaveCommand

#: Time limit for the ``left`` event [s]: a peer first finishes or abandons its present round.
PATIENCE_S = 30.0
EXIT_S = 15.0


class Leave(EndsPeers):
    """Asks peers to hand over their samples and leave: a swarm that shrinks."""

    about = "Asks a peer to hand over its samples and leave the swarm."
    needs = ()

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Send the command."""
        require_living(swarm, targets)
        for peer in targets:
            swarm.expect_loss(peer)
        self._left = Listening(swarm, Left, targets)
        await for_each(targets, lambda peer: swarm.command(peer, LeaveCommand()))
        return {}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check that each peer sent ``left`` and that no process of it remains."""

        async def check(peer: str) -> Record:
            left = handed_over(await self._left.heard(peer, PATIENCE_S))
            if left is None:
                return {"left": None, "gone": False}
            states = await wait_for_states(swarm, peer, all_are("gone"), EXIT_S)
            return {"left": left, "gone": all_are("gone")(states)}

        seen = await for_each(targets, check)
        return Proof(all(each["gone"] for each in seen.values()), seen)
