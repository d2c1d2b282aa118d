"""Stops peers for a while: to the others they are a black hole."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

from rayhive.errors import RayhiveError
from rayhive.faults.kind import Effect, FaultKind, Group, Proof
from rayhive.faults.kinds._process import SETTLE_S, all_are, require_living, wait_for_states
from rayhive.faults.target import FaultTarget
from rayhive.spec.fault_plan import PlannedFault


class Pause(FaultKind):
    """SIGSTOP to the process group of each peer, SIGCONT to heal.

    Connections stay open and nothing answers, which is what a machine that swaps, or one behind
    a dead link, looks like from the outside.
    """

    about: ClassVar[str] = "Stops all the processes of a peer (SIGSTOP) until it is healed."
    group: ClassVar[Group] = "process"
    effect: ClassVar[Effect] = "stopped"
    heals: ClassVar[bool] = True

    def __init__(self, planned: PlannedFault) -> None:
        super().__init__(planned)
        self._stopped: list[str] = []

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Stop them."""
        require_living(swarm, who)
        self._stopped = list(who)
        hit = await asyncio.gather(*(swarm.signal(peer, signal.SIGSTOP) for peer in who))
        self._hit = dict(zip(who, hit, strict=True))
        return {"pids": self._hit}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """See in each process's state that it is stopped."""
        ok, seen = True, {}
        for peer in who:
            hit = self._hit[peer]

            def stopped(states: dict[int, str], hit: list[int] = hit) -> bool:
                return bool(hit) and all(states.get(pid) == "stopped" for pid in hit)

            states = await wait_for_states(swarm, peer, stopped, SETTLE_S)
            ok = ok and stopped(states)
            seen[peer] = {str(pid): states.get(pid, "gone") for pid in hit}
        return Proof(ok, {"states": seen})

    async def heal(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Let them run again."""
        hit = await asyncio.gather(*(swarm.signal(peer, signal.SIGCONT) for peer in who))
        self._stopped = []
        running = {
            peer: await wait_for_states(swarm, peer, _none_stopped, SETTLE_S) for peer in who
        }
        return {
            "pids": dict(zip(who, hit, strict=True)),
            "running": {peer: all_are("running")(states) for peer, states in running.items()},
        }

    async def teardown(self, swarm: FaultTarget) -> None:
        """Let run again what was never healed: a stopped process does not end by itself."""
        for peer in self._stopped:
            with contextlib.suppress(RayhiveError):
                await swarm.signal(peer, signal.SIGCONT)


def _none_stopped(states: dict[int, str]) -> bool:
    return "stopped" not in states.values()
