"""A link loses packets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rayhive.faults.kinds._link import LinkFault
from rayhive.spec import Model


class LossArgs(Model):
    """Parameters.

    Attributes:
        loss: Share of the packets that get lost, in each direction.
    """

    loss: float = Field(default=0.05, gt=0, lt=1)


class Loss(LinkFault):
    """Loses packets on a node's link at random."""

    about = "Some of the packets to and from a node get lost."
    key = "loss"
    measured = "loss"
    Args = LossArgs

    def worse(self, value: float, present: float | None) -> bool:
        """Return whether more gets lost than at present."""
        return value > (present or 0.0)

    def proves(self, seen: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
        """Return whether the share that was lost is nearer to what was asked than to before."""
        shares = [seen[key] for key in ("loss_up", "loss_down")]
        if None in shares:
            return False
        return bool(sum(shares) / 2 >= (self.args.loss + before["loss"]) / 2)
