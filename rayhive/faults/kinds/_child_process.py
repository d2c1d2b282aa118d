"""Faults that kill one process of a peer, which then has to end by itself."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from rayhive.faults.kind import Proof
from rayhive.faults.kinds._process import (
    SETTLE_S,
    EndsPeers,
    Listening,
    all_are,
    require_living,
    wait_for_states,
)
from rayhive.faults.target import FaultTarget, ProcessRole


class LosesChildProcess(EndsPeers):
    """Kills one process without which a peer cannot go on: it has to see that, and end."""

    #: How long the peer may take to end by itself [s]. The proof says how long it took.
    patience_s: ClassVar[float] = 20.0

    @property
    def process(self) -> ProcessRole:
        """The process that is killed."""
        raise NotImplementedError

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Send SIGKILL to the process."""
        require_living(swarm, who)
        for peer in who:
            swarm.expect_loss(peer)
        self._failed = Listening(swarm, "peer_failed", who)
        self._began = time.monotonic()
        hit = await asyncio.gather(
            *(swarm.signal(peer, signal.SIGKILL, self.process) for peer in who)
        )
        self._hit = dict(zip(who, hit, strict=True))
        return {"process": self.process, "pids": self._hit}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """See that the process is gone, and that its peer said so and ended."""
        seen = await asyncio.gather(*(self._look(swarm, peer) for peer in who))
        what = {peer: what for peer, (_, what) in zip(who, seen, strict=True)}
        return Proof(all(ok for ok, _ in seen), what)

    async def _look(self, swarm: FaultTarget, peer: str) -> tuple[bool, dict[str, Any]]:
        hit = self._hit[peer]
        one = await wait_for_states(swarm, peer, all_are("gone", hit), SETTLE_S, self.process)
        event = await self._failed.heard(peer, self.patience_s)
        whole = await wait_for_states(swarm, peer, all_are("gone", hit), SETTLE_S)
        seconds = time.monotonic() - self._began
        gone, ended = all_are("gone", hit)(one), all_are("gone", hit)(whole)
        what = {
            "process_gone": gone,
            "peer_gone": ended,
            "error": None if event is None else event.get("error"),
            "seconds": round(seconds, 3),
        }
        return bool(hit) and gone and ended and event is not None, what
