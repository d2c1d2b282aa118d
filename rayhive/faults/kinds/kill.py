"""Kills peers without a word."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

from rayhive.faults.kind import Proof
from rayhive.faults.kinds._process import (
    SETTLE_S,
    EndsPeers,
    all_are,
    require_living,
    wait_for_states,
)
from rayhive.faults.target import FaultTarget


class Kill(EndsPeers):
    """SIGKILL to the whole process group of each peer, all at once."""

    about: ClassVar[str] = "Kills all the processes of a peer at once (SIGKILL)."

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Send the signal."""
        require_living(swarm, who)
        for peer in who:
            swarm.expect_loss(peer)
        hit = await asyncio.gather(*(swarm.signal(peer, signal.SIGKILL) for peer in who))
        self._hit = dict(zip(who, hit, strict=True))
        return {"pids": self._hit}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """See that no process is left of any of them."""
        ok, left = True, {}
        for peer in who:
            gone = all_are("gone", self._hit[peer])
            states = await wait_for_states(swarm, peer, gone, SETTLE_S)
            ok = ok and bool(self._hit[peer]) and gone(states)
            left[peer] = [pid for pid, state in states.items() if state != "gone"]
        return Proof(ok, {"left": left, "killed": sum(map(len, self._hit.values()))})
