"""Fault ``rate``: a link becomes slow."""

from __future__ import annotations

from pydantic import Field

from rayhive.faults.link import LinkFault
from rayhive.faults.node_tools import LinkMeasurement
from rayhive.spec import Link, Model

#: Measured rate, relative to the requested one, up to which the fault is proved.
_TOLERANCE = 1.15


class RateArgs(Model):
    """Parameters of :class:`Rate`.

    Attributes:
        rate_mbit: Rate of the link in each direction [Mbit/s].
    """

    rate_mbit: float = Field(default=5.0, gt=0)


class Rate(LinkFault):
    """Lowers the rate of a node's link."""

    about = "A node's link becomes slow in both directions."
    key = "rate_mbit"
    args: RateArgs

    def worse(self, value: float, present: float | None) -> bool:
        """Return whether the rate is lower than the present one."""
        return present is None or value < present

    def proves(self, seen: LinkMeasurement, before: Link) -> bool:
        """Return whether a stream that is sent faster arrives no faster than the requested rate.

        The bound is also below the mean of the requested rate and the one before.
        """
        bound = _TOLERANCE * float(self.args.rate_mbit)
        if before.rate_mbit is not None:
            bound = min(bound, (self.args.rate_mbit + before.rate_mbit) / 2)
        rates = (seen.rate_up_mbit, seen.rate_down_mbit)
        return all(rate is not None and 0 < rate <= bound for rate in rates)
