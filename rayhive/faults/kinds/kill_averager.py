"""Fault ``kill_averager``: one of a peer's two averaging processes ends."""

from __future__ import annotations

from typing import Literal

from rayhive.faults.ending import ChildProcessKill, EndsPeers, ReplacedArgs
from rayhive.faults.kind import Proof, Record, Targets
from rayhive.faults.target import FaultTarget


class KillAveragerArgs(ReplacedArgs):
    """Parameters of :class:`KillAverager`.

    Attributes:
        which: ``gradient`` for the averager of gradients, ``state`` for that of parameters and
            optimizer statistics.
    """

    which: Literal["gradient", "state"] = "gradient"


class KillAverager(EndsPeers):
    """Kills an averager, whose answers the trainer would otherwise wait for without limit."""

    about = "Kills an averaging process of a peer, which has to notice and end."
    args: KillAveragerArgs
    of_swarm = True

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Send SIGKILL to the averager."""
        gradient = self.args.which == "gradient"
        self._kill = ChildProcessKill("gradient_averager" if gradient else "state_averager")
        return await self._kill.inject(swarm, targets)

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check that the averager is gone, and that its peer reported it and ended."""
        return await self._kill.verify(swarm, targets)
