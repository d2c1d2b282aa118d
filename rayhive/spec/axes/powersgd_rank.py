"""Rank of the PowerSGD factors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.registry import AVERAGERS
from rayhive.spec.axes.base import Axis, Values, is_whole
from rayhive.spec.model import MOST
from rayhive.spec.swarm import SwarmConfig


class PowerSGDRank(Axis):
    """Rank of the factors that peers average in place of gradients; None is no PowerSGD."""

    name = "powersgd_rank"
    type = int | None
    default = None
    kind = "integer"
    payload_argument = "powersgd_rank"
    column = Column(
        "powersgd_rank", "Rank of the PowerSGD factors; empty without PowerSGD", type="count"
    )
    examples = (1, 2, None)

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a rank that no matrix has."""
        if value is not None and not is_whole(value, 1, MOST):
            allowed = f"a whole number, at least 1 and at most {MOST}, or null for no PowerSGD"
            yield Problem(key, value, allowed)

    def conflicts(self, value: Any, swarm: SwarmConfig) -> Iterator[str]:
        """Find robust aggregation rules, which need the gradients of every peer."""
        if swarm.aggregation != "mean" and value is not None:
            yield f"null with swarm.aggregation {swarm.aggregation}: factors have to be averaged"

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Choose the averager with factors of this rank."""
        rank = values[self.name]
        if rank is not None:
            averager = AVERAGERS.get("powersgd")
            arguments["grad_averager_factory"] = partial(averager, averager_rank=rank)

    def label(self, value: Any) -> str:
        """Return the rank, or nothing without PowerSGD."""
        return "" if value is None else f"rank{value}"
