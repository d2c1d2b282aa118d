"""Steps that peers make on their own between two rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.axes.base import Axis, Values, is_whole
from rayhive.spec.model import MOST


class LocalSteps(Axis):
    """Batches of the swarm between two rounds of local steps; None is a round after each batch.

    See :mod:`rayhive.optim.local_steps`, and :attr:`rayhive.spec.replicate.TrainingSpec.round_size`
    for the samples of a round.
    """

    name = "local_steps"
    type = int | None
    default = None
    kind = "integer"
    column = Column(
        "local_steps",
        "Batches of the swarm in a round of local steps; empty for rounds of gradients",
        type="count",
    )
    examples = (4, 16)

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a value that is no number of batches."""
        if value is not None and not is_whole(value, 1, MOST):
            allowed = f"a whole number, at least 1 and at most {MOST}, or null for no local steps"
            yield Problem(key, value, allowed)

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the number of batches."""
        if values[self.name] is not None:
            arguments[self.name] = int(values[self.name])

    def label(self, value: Any) -> str:
        """Return the number of batches, or nothing without local steps."""
        return "" if value is None else f"local{value}"
