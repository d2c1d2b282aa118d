"""Fault ``kill_p2pd``: the network daemon of a peer ends."""

from __future__ import annotations

from typing import ClassVar

from rayhive.faults.kinds._child_process import LosesChildProcess
from rayhive.faults.target import ProcessRole


class KillP2pd(LosesChildProcess):
    """Kills p2pd, which is never restarted."""

    about: ClassVar[str] = "Kills the network daemon of a peer, which has to notice and end."

    @property
    def process(self) -> ProcessRole:
        """The daemon."""
        return "p2pd"
