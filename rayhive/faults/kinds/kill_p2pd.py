"""Kills the network daemon of a peer."""

from __future__ import annotations

from typing import ClassVar

from rayhive.faults.ground import ProcessRole
from rayhive.faults.kinds.loses_process import LosesProcess


class KillP2pd(LosesProcess):
    """Kills p2pd, which nothing restarts."""

    about: ClassVar[str] = "Kills the network daemon of a peer, which has to notice and end."

    @property
    def process(self) -> ProcessRole:
        """The daemon."""
        return "p2pd"
