"""A link becomes slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from rayhive.faults.kinds._link import LinkFault
from rayhive.spec import Model

_TOLERANCE = 1.15


class RateArgs(Model):
    """Parameters.

    Attributes:
        rate_mbit: Rate of the link in each direction [Mbit/s].
    """

    rate_mbit: float = Field(default=5.0, gt=0)


class Rate(LinkFault):
    """Lowers the rate of a node's link."""

    about = "A node's link becomes slow in both directions."
    key = "rate_mbit"
    measured = "rate"
    Args = RateArgs

    def worse(self, value: float, present: float | None) -> bool:
        """Return whether the rate is lower than the present one."""
        return present is None or value < present

    def proves(self, seen: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
        """Return whether a stream that is faster than the rate arrives no faster than it."""
        rates = [seen[key] for key in ("rate_up_mbit", "rate_down_mbit")]
        return all(rate is not None and 0 < rate <= self._bound(before) for rate in rates)

    def _bound(self, before: Mapping[str, Any]) -> float:
        """Return a rate below what the link did before [Mbit/s]."""
        bound = _TOLERANCE * float(self.args.rate_mbit)
        present = before["rate_mbit"]
        return bound if present is None else min(bound, (self.args.rate_mbit + present) / 2)
