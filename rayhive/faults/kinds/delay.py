"""Packets on a link take longer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rayhive.faults.kinds._link import LinkFault
from rayhive.spec import Model


class DelayArgs(Model):
    """Parameters.

    Attributes:
        delay_ms: Delay of the link in each direction [ms].
    """

    delay_ms: float = Field(default=200.0, gt=0)


class Delay(LinkFault):
    """Delays packets on a node's link."""

    about = "Every packet to and from a node takes longer."
    key = "delay_ms"
    measured = "rtt"
    Args = DelayArgs

    def worse(self, value: float, present: float | None) -> bool:
        """Return whether the delay is longer than the present one."""
        return value > (present or 0.0)

    def proves(self, seen: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
        """Return whether packets take longer than they could have before.

        Traffic makes them wait in queues too, so there is no upper bound; the lower one is nine
        tenths of what was asked, and nearer to it than to what was before.
        """
        if seen["rtt_ms"] is None:
            return False
        asked, present = self.args.delay_ms, before["delay_ms"]
        return bool(seen["rtt_ms"] >= 2 * max(0.9 * asked, (asked + present) / 2))
