"""Kill of one child process of a peer, which then has to end by itself."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from typing import Any

from rayhive.faults.kind import Proof
from rayhive.faults.kinds._process import (
    SETTLE_S,
    Listening,
    all_are,
    require_living,
    wait_for_states,
)
from rayhive.faults.target import FaultTarget, ProcessRole

#: Time limit for a peer to end by itself [s]; the proof records the time that it took.
PATIENCE_S = 20.0


class ChildProcessKill:
    """Kills one process that a peer cannot train without: the peer has to detect it and end.

    Args:
        process: The process to kill.
    """

    def __init__(self, process: ProcessRole) -> None:
        self._process = process

    async def inject(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """Send SIGKILL to the process."""
        require_living(swarm, targets)
        for peer in targets:
            swarm.expect_loss(peer)
        self._failed = Listening(swarm, "peer_failed", targets)
        self._began = time.monotonic()
        hit = await asyncio.gather(
            *(swarm.signal(peer, signal.SIGKILL, self._process) for peer in targets)
        )
        self._hit = dict(zip(targets, hit, strict=True))
        return {"process": self._process, "pids": self._hit}

    async def verify(self, swarm: FaultTarget, targets: Sequence[str]) -> Proof:
        """Check that the process is gone, and that its peer reported it and ended."""
        seen = await asyncio.gather(*(self._check(swarm, peer) for peer in targets))
        what = {peer: what for peer, (_, what) in zip(targets, seen, strict=True)}
        return Proof(all(ok for ok, _ in seen), what)

    async def _check(self, swarm: FaultTarget, peer: str) -> tuple[bool, dict[str, Any]]:
        hit = self._hit[peer]
        one = await wait_for_states(swarm, peer, all_are("gone", hit), SETTLE_S, self._process)
        event = await self._failed.heard(peer, PATIENCE_S)
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
