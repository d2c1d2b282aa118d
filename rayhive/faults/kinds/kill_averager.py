"""Fault ``kill_averager``: one of a peer's two averaging processes ends."""

from __future__ import annotations

from typing import ClassVar, Literal

from rayhive.faults.kinds._child_process import LosesChildProcess
from rayhive.faults.kinds._process import ReplacedArgs
from rayhive.faults.target import ProcessRole
from rayhive.spec import Model


class Args(ReplacedArgs):
    """Parameters of :class:`KillAverager`.

    Attributes:
        which: ``gradient`` for the averager of gradients, ``state`` for that of parameters and
            optimizer statistics.
    """

    which: Literal["gradient", "state"] = "gradient"


class KillAverager(LosesChildProcess):
    """Kills an averager, whose answers the trainer would otherwise wait for without limit."""

    about: ClassVar[str] = "Kills an averaging process of a peer, which has to notice and end."
    Args: ClassVar[type[Model]] = Args

    @property
    def process(self) -> ProcessRole:
        """The averager that ``which`` names."""
        return "gradient_averager" if self.args.which == "gradient" else "state_averager"
