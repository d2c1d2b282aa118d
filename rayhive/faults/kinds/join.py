"""Fault ``join``: new peers join a swarm that trains."""

from __future__ import annotations

from rayhive.faults.kind import FaultKind, Proof, Record, Targets
from rayhive.faults.steps import SETTLE_S, for_each, wait_for_states
from rayhive.faults.target import FaultTarget


class Join(FaultKind):
    """Starts a peer that is new to the swarm: a late joiner, or a swarm that grows."""

    about = "Starts a peer that joins the swarm while it trains."
    group = "process"
    needs = ()
    joins = True

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Start the peers."""
        return {"lives": await for_each(targets, swarm.start)}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check that each has a running process."""
        pids = {}
        for peer in targets:
            states = await wait_for_states(
                swarm, peer, lambda states: "running" in states.values(), SETTLE_S, "trainer"
            )
            pids[peer] = [pid for pid, state in states.items() if state == "running"]
        return Proof(all(pids.values()), {"pids": pids})
