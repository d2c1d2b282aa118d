"""Bounds of the phases of a replicate."""

from __future__ import annotations

from dataclasses import dataclass, field

from rayhive.spec import Timeouts


@dataclass(frozen=True)
class PhaseTimeouts:
    """Bounds of the phases of a replicate, and of the life of its actors, all in seconds.

    The budget of a replicate bounds its training; these bound everything around it.

    Attributes:
        study: The bounds that a study sets.
        hurry: In place of ``stopping`` and ``teardown`` when the result no longer matters: the
            replicate failed or was asked to end.
        linger: Time after which a supervisor exits although its outcome was not fetched.
        agent_idle: Time after which an agent without a replicate exits with its forkserver.
    """

    study: Timeouts = field(default_factory=Timeouts)
    hurry: float = 3.0
    linger: float = 3600.0
    agent_idle: float = 900.0
