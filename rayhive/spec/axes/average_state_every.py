"""Rounds between two averagings of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.axes.base import Axis, Values, is_whole
from rayhive.spec.model import MOST, exponent


def _read(value: Any) -> Any:
    found = exponent(value)
    return int(found) if is_whole(found, 1, MOST) else found


#: Rounds between two averagings, or ``auto`` where the reason is not time.
Period = Annotated[int | Literal["auto"], BeforeValidator(_read)]


class AverageStateEvery(Axis):
    """Rounds between two averagings of the parameters themselves.

    ``auto`` averages them only where replicas may differ: after a round that failed or was partial,
    a join, a partition, or where the peers' fingerprints differ
    (:mod:`rayhive.optim.replica_check`).
    """

    name = "average_state_every"
    type = Period
    default = "auto"
    kind = "choice"
    column = Column(
        "average_state_every", "Rounds between two averagings of parameters", type="text"
    )
    examples = ("auto", 1)

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a value that is no number of rounds."""
        if value != "auto" and not is_whole(value, 1, MOST):
            yield Problem(key, value, f"auto, or a whole number of rounds, from 1 to {MOST}")

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the period."""
        arguments[self.name] = values[self.name]

    def label(self, value: Any) -> str:
        """Return the period, or nothing where the reason is not time."""
        return "" if value == "auto" else f"state-every-{value}"
