"""Fault ``delay``: packets on a link take longer."""

from __future__ import annotations

from pydantic import Field

from rayhive.faults.link import LinkFault
from rayhive.faults.node_tools import LinkMeasurement
from rayhive.spec import Link, Model


class DelayArgs(Model):
    """Parameters of :class:`Delay`.

    Attributes:
        delay_ms: Delay of the link in each direction [ms].
    """

    delay_ms: float = Field(default=200.0, gt=0)


class Delay(LinkFault):
    """Delays packets on a node's link."""

    about = "Every packet to and from a node takes longer."
    key = "delay_ms"
    args: DelayArgs

    def proves(self, seen: LinkMeasurement, before: Link) -> bool:
        """Return whether packets take longer than they could have before.

        There is no upper bound, as traffic adds queueing. The lower bound is nine tenths of the
        requested delay, and closer to it than to the delay before.
        """
        if seen.rtt_ms is None:
            return False
        asked, present = float(self.args.delay_ms), before.delay_ms
        return seen.rtt_ms >= 2 * max(0.9 * asked, (asked + present) / 2)
