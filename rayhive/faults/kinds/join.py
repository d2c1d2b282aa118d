"""Fault ``join``: new peers join a swarm that trains."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from rayhive.faults.kind import FaultKind, Group, Proof
from rayhive.faults.kinds._process import SETTLE_S, wait_for_states
from rayhive.faults.target import FaultTarget


class Join(FaultKind):
    """Starts a peer that is new to the swarm: a late joiner, or a swarm that grows."""

    about: ClassVar[str] = "Starts a peer that joins the swarm while it trains."
    group: ClassVar[Group] = "process"
    needs: ClassVar[tuple[str, ...]] = ()
    joins: ClassVar[bool] = True

    async def inject(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """Start the peers."""
        names = await asyncio.gather(*(swarm.start(peer) for peer in targets))
        return {"lives": dict(zip(targets, names, strict=True))}

    async def verify(self, swarm: FaultTarget, targets: Sequence[str]) -> Proof:
        """Check that each has a running process."""
        pids = {}
        for peer in targets:
            states = await wait_for_states(swarm, peer, _runs, SETTLE_S, "trainer")
            pids[peer] = [pid for pid, state in states.items() if state == "running"]
        return Proof(all(pids.values()), {"pids": pids})


def _runs(states: dict[int, str]) -> bool:
    return "running" in states.values()
