"""Peers that average with each other in a round of local steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.axes.base import Axis, Values
from rayhive.spec.model import exponent
from rayhive.spec.swarm import SwarmConfig

#: Peers of a pair.
PAIR = 2
#: Values of the other axes with which pairs are shown to be right.
ALONE: dict[str, tuple[Any, ...]] = {
    "codec": ("none",),
    "error_feedback": (None, False),
    "powersgd_rank": (None,),
    "delay": ("none",),
    "average_state_every": ("auto",),
    "state_codec": ("none",),
    "inner_state": ("keep", "reset", None),
    "fragments": (1, None),
    "mixing": (None,),
    "min_peers": (None,),
}
#: Reasons for which other values are refused.
UNCHANGED = "pairs exchange parameters as they are"
WHY = {"min_peers": "a pair awaits both of its peers"}


def _read(value: Any) -> Any:
    found = exponent(value)
    return PAIR if found == PAIR and not isinstance(found, bool) else found


class GroupSize(Axis):
    """Peers of a group: ``all`` average in one group, 2 average in random pairs.

    Pairs are NoLoCo (arXiv:2506.10911, :mod:`rayhive.optim.gossip`). They exchange parameters, and
    each peer has its own, so that codecs of gradients and averagings of parameters are refused.
    """

    name = "group_size"
    type = Annotated[int | Literal["all"], BeforeValidator(_read)]
    default = "all"
    kind = "choice"
    depends_on = ("local_steps",)
    excluded_by = tuple(ALONE)
    column = Column(
        "group_size", "Peers that average with each other in a round of local steps", type="text"
    )
    examples = ("all", 2)

    def applies(self, values: Values) -> bool:
        """Return whether there are local steps."""
        return values["local_steps"] is not None

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a size that no group policy has."""
        if isinstance(value, bool) or value not in ("all", PAIR):
            yield Problem(key, value, "all, or 2 for random pairs")

    def conflicts(self, value: Any, swarm: SwarmConfig) -> Iterator[str]:
        """Find rules of aggregation that need more peers than a pair has."""
        if value == PAIR and swarm.aggregation != "mean":
            yield f"all with swarm.aggregation {swarm.aggregation}: a pair has a mean only"

    def excludes(self, value: Any, values: Values) -> Iterator[str]:
        """Find values of other axes that have no effect with pairs, or were not shown."""
        if value != PAIR:
            return
        for name, allowed in ALONE.items():
            if not any(values[name] == each for each in allowed):
                yield f"all with {name} {values[name]}: {WHY.get(name, UNCHANGED)}"

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the size."""
        if values[self.name] == PAIR:
            arguments[self.name] = PAIR

    def label(self, value: Any) -> str:
        """Return the name of the policy, or nothing for one group."""
        return "" if value == "all" else "pairs"
