"""Fault ``pause``: peers stop for a while and become a black hole to the other peers."""

from __future__ import annotations

import contextlib
import signal

from rayhive.errors import RayhiveError
from rayhive.faults.kind import FaultKind, Proof, Record, Targets
from rayhive.faults.steps import SETTLE_S, all_are, for_each, require_living, wait_for_states
from rayhive.faults.target import FaultTarget


class Pause(FaultKind):
    """Sends SIGSTOP to the process group of each peer, and SIGCONT to heal.

    Connections stay open and no request is answered. A machine that swaps, or one behind a dead
    link, looks the same from outside.
    """

    about = "Stops all the processes of a peer (SIGSTOP) until it is healed."
    group = "process"
    effect = "stopped"
    heals = True

    _stopped: Targets = ()

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Stop the processes."""
        require_living(swarm, targets)
        self._stopped = targets
        self._hit = await for_each(targets, lambda peer: swarm.signal(peer, signal.SIGSTOP))
        return {"pids": self._hit}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check in the kernel's state of each process that it is stopped."""

        async def check(peer: str) -> dict[str, str]:
            hit = self._hit[peer]

            def stopped(states: dict[int, str]) -> bool:
                return all(states.get(pid) == "stopped" for pid in hit)

            states = await wait_for_states(swarm, peer, stopped, SETTLE_S)
            return {str(pid): states.get(pid, "gone") for pid in hit}

        seen = await for_each(targets, check)
        ok = all(each and set(each.values()) == {"stopped"} for each in seen.values())
        return Proof(ok, {"states": seen})

    async def heal(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Continue the processes."""
        hit = await for_each(targets, lambda peer: swarm.signal(peer, signal.SIGCONT))
        self._stopped = ()

        async def runs(peer: str) -> bool:
            states = await wait_for_states(
                swarm, peer, lambda states: "stopped" not in states.values(), SETTLE_S
            )
            return all_are("running")(states)

        return {"pids": hit, "running": await for_each(targets, runs)}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Continue the processes that were not healed: a stopped process does not end by itself."""
        for peer in self._stopped:
            with contextlib.suppress(RayhiveError):
                await swarm.signal(peer, signal.SIGCONT)
