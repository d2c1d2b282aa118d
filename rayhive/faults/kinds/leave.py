"""Has peers leave in good order."""

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

#: A peer may be in the middle of a round, which it finishes or gives up first [s].
_PATIENCE_S = 30.0
_EXIT_S = 15.0


class Leave(EndsPeers):
    """Asks peers to hand over what they have and go: a swarm that shrinks."""

    about: ClassVar[str] = "Asks a peer to hand over its samples and leave the swarm."
    needs: ClassVar[tuple[str, ...]] = ()

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Ask them."""
        require_living(swarm, who)
        for peer in who:
            swarm.expect_loss(peer)
        self._left = Listening(swarm, "left", who)
        await asyncio.gather(*(swarm.command(peer, "leave") for peer in who))
        return {}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """See that each said goodbye and that nothing is left of it."""
        seen = await asyncio.gather(*(self._look(swarm, peer) for peer in who))
        ok = all(each["left"] is not None and each["gone"] for each in seen)
        return Proof(ok, dict(zip(who, seen, strict=True)))

    async def _look(self, swarm: FaultTarget, peer: str) -> dict[str, Any]:
        event = await self._left.heard(peer, _PATIENCE_S)
        if event is None:
            return {"left": None, "gone": False}
        states = await wait_for_states(swarm, peer, all_are("gone"), _EXIT_S)
        left = {key: event.get(key) for key in ("round", "handed_over", "lost")}
        return {"left": left, "gone": all_are("gone")(states)}
