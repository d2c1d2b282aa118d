"""How long the phases of a replicate may take before the supervisor loses patience."""

from __future__ import annotations

from dataclasses import dataclass

from rayhive.spec import Timeouts


@dataclass(frozen=True)
class PhaseTimeouts:
    """Bounds of a replicate's phases, all in seconds.

    The budget of a replicate bounds its training; these bound everything around it.

    Attributes:
        placement: Wait for room on the cluster, while other replicates hold it.
        supervisor: From the start of the supervisor's actor to its first answer.
        startup: From the first peer's start to its DHT: the forkserver's imports and every process.
        barrier: From the first peer's DHT to the barrier: data, model and DHT of every peer.
        stop: From the command to stop to the last peer's end of training; an averaging that
            runs may end first, so the swarm's ``averaging_timeout`` is added.
        shutdown: From the command to shut down to the exit of the last peer.
        hurry: In place of ``stop`` and ``shutdown`` when the result no longer matters: the
            replicate failed or somebody wants it to end.
        unreachable: How long an actor may be unavailable before it counts as lost.
        linger: How long a supervisor whose outcome nobody takes stays.
        agent_idle: How long an agent without a replicate keeps itself and its forkserver.
    """

    placement: float = 600.0
    supervisor: float = 60.0
    startup: float = 120.0
    barrier: float = 120.0
    stop: float = 15.0
    shutdown: float = 15.0
    hurry: float = 3.0
    unreachable: float = 60.0
    linger: float = 3600.0
    agent_idle: float = 900.0

    @classmethod
    def of(cls, timeouts: Timeouts) -> PhaseTimeouts:
        """Return the bounds that a study sets."""
        return cls(
            placement=timeouts.placing,
            supervisor=timeouts.supervisor,
            startup=timeouts.starting,
            barrier=timeouts.barrier,
            stop=timeouts.stopping,
            shutdown=timeouts.teardown,
            unreachable=timeouts.unreachable,
        )
