"""Fault ``pause``: peers stop for a while and become a black hole to the other peers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

from rayhive.errors import RayhiveError
from rayhive.events.supervisor import FaultEffect
from rayhive.faults.kind import FaultKind, Group, Proof
from rayhive.faults.kinds._process import SETTLE_S, all_are, require_living, wait_for_states
from rayhive.faults.target import FaultTarget
from rayhive.spec.fault_plan import PlannedFault


class Pause(FaultKind):
    """Sends SIGSTOP to the process group of each peer, and SIGCONT to heal.

    Connections stay open and no request is answered. A machine that swaps, or one behind a dead
    link, looks the same from outside.
    """

    about: ClassVar[str] = "Stops all the processes of a peer (SIGSTOP) until it is healed."
    group: ClassVar[Group] = "process"
    effect: ClassVar[FaultEffect] = "stopped"
    heals: ClassVar[bool] = True

    def __init__(self, planned: PlannedFault) -> None:
        super().__init__(planned)
        self._stopped: list[str] = []

    async def inject(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """Stop the processes."""
        require_living(swarm, targets)
        self._stopped = list(targets)
        hit = await asyncio.gather(*(swarm.signal(peer, signal.SIGSTOP) for peer in targets))
        self._hit = dict(zip(targets, hit, strict=True))
        return {"pids": self._hit}

    async def verify(self, swarm: FaultTarget, targets: Sequence[str]) -> Proof:
        """Check in the kernel's state of each process that it is stopped."""
        ok, seen = True, {}
        for peer in targets:
            hit = self._hit[peer]

            def stopped(states: dict[int, str], hit: list[int] = hit) -> bool:
                return bool(hit) and all(states.get(pid) == "stopped" for pid in hit)

            states = await wait_for_states(swarm, peer, stopped, SETTLE_S)
            ok = ok and stopped(states)
            seen[peer] = {str(pid): states.get(pid, "gone") for pid in hit}
        return Proof(ok, {"states": seen})

    async def heal(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """Continue the processes."""
        hit = await asyncio.gather(*(swarm.signal(peer, signal.SIGCONT) for peer in targets))
        self._stopped = []
        running = {
            peer: await wait_for_states(swarm, peer, _none_stopped, SETTLE_S) for peer in targets
        }
        return {
            "pids": dict(zip(targets, hit, strict=True)),
            "running": {peer: all_are("running")(states) for peer, states in running.items()},
        }

    async def teardown(self, swarm: FaultTarget) -> None:
        """Continue the processes that were not healed: a stopped process does not end by itself."""
        for peer in self._stopped:
            with contextlib.suppress(RayhiveError):
                await swarm.signal(peer, signal.SIGCONT)


def _none_stopped(states: dict[int, str]) -> bool:
    return "stopped" not in states.values()
