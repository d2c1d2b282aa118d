"""Fault ``leave``: peers leave the swarm in an orderly way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from rayhive.faults.kind import Proof
from rayhive.faults.kinds._process import (
    EndsPeers,
    Listening,
    all_are,
    require_living,
    wait_for_states,
)
from rayhive.faults.target import FaultTarget

#: Time limit for the ``left`` event [s]: a peer first finishes or abandons its present round.
_PATIENCE_S = 30.0
_EXIT_S = 15.0


class Leave(EndsPeers):
    """Asks peers to hand over their samples and leave: a swarm that shrinks."""

    about: ClassVar[str] = "Asks a peer to hand over its samples and leave the swarm."
    needs: ClassVar[tuple[str, ...]] = ()

    async def inject(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """Send the command."""
        require_living(swarm, targets)
        for peer in targets:
            swarm.expect_loss(peer)
        self._left = Listening(swarm, "left", targets)
        await asyncio.gather(*(swarm.command(peer, "leave") for peer in targets))
        return {}

    async def verify(self, swarm: FaultTarget, targets: Sequence[str]) -> Proof:
        """Check that each peer sent ``left`` and that no process of it remains."""
        seen = await asyncio.gather(*(self._check(swarm, peer) for peer in targets))
        ok = all(each["left"] is not None and each["gone"] for each in seen)
        return Proof(ok, dict(zip(targets, seen, strict=True)))

    async def _check(self, swarm: FaultTarget, peer: str) -> dict[str, Any]:
        event = await self._left.heard(peer, _PATIENCE_S)
        if event is None:
            return {"left": None, "gone": False}
        states = await wait_for_states(swarm, peer, all_are("gone"), _EXIT_S)
        left = {key: event.get(key) for key in ("round", "handed_over", "lost")}
        return {"left": left, "gone": all_are("gone")(states)}
