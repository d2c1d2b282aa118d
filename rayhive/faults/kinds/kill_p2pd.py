"""Kills the network daemon of a peer."""

from __future__ import annotations

from typing import ClassVar

from rayhive.faults.kinds._child_process import LosesChildProcess
from rayhive.faults.target import ProcessRole


class KillP2pd(LosesChildProcess):
    """Kills p2pd, which nothing restarts."""

    about: ClassVar[str] = "Kills the network daemon of a peer, which has to notice and end."

    @property
    def process(self) -> ProcessRole:
        """The daemon."""
        return "p2pd"
