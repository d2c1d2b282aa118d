"""Fault ``loss``: a link loses packets."""

from __future__ import annotations

from pydantic import Field

from rayhive.faults.link import LinkFault
from rayhive.faults.node_tools import LinkMeasurement
from rayhive.spec import Link, Model


class LossArgs(Model):
    """Parameters of :class:`Loss`.

    Attributes:
        loss: Share of the packets that is lost, in each direction.
    """

    loss: float = Field(default=0.05, gt=0, lt=1)


class Loss(LinkFault):
    """Drops packets on a node's link at random."""

    about = "Some of the packets to and from a node get lost."
    key = "loss"
    args: LossArgs

    def proves(self, seen: LinkMeasurement, before: Link) -> bool:
        """Return whether the measured loss is closer to the requested one than to the one before.

        Both directions are averaged.
        """
        if seen.loss_up is None or seen.loss_down is None:
            return False
        return (seen.loss_up + seen.loss_down) / 2 >= (float(self.args.loss) + before.loss) / 2
