"""Quorum of a round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.axes.base import Axis, Values, is_whole
from rayhive.spec.swarm import MOST_PEERS, SwarmConfig


class MinPeers(Axis):
    """Peers with which a round begins although others still compute; None awaits all.

    A round has more than half of the live peers in any case
    (:class:`rayhive.averaging.quorum.Quorum`). Values with the effect of another one are refused.
    """

    name = "min_peers"
    type = int | None
    default = None
    kind = "integer"
    excluded_by = ("delay",)
    column = Column(
        "min_peers", "Peers with which a round may begin; empty if it awaits all", type="count"
    )
    examples = (5, 6)

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a number that no group has."""
        if value is not None and not is_whole(value, 2, MOST_PEERS):
            allowed = f"a whole number, at least 2 and at most {MOST_PEERS}, or null to await all"
            yield Problem(key, value, allowed)

    def conflicts(self, value: Any, swarm: SwarmConfig) -> Iterator[str]:
        """Find quorums that have no effect, or the effect of another value."""
        if value is None or not is_whole(value, 2, MOST_PEERS):
            return
        least = swarm.peers // 2 + 1
        if value >= swarm.peers:
            allowed = f"less than swarm.peers ({swarm.peers})"
            yield f"{allowed}, or null: a quorum of all peers awaits all of them"
        elif value < least:
            yield f"at least {least}, more than half of swarm.peers: a round has one group"

    def excludes(self, value: Any, values: Values) -> Iterator[str]:
        """Find gradients that are averaged in the background."""
        if value is not None and values["delay"] == "gradients":
            yield (
                "null with delay gradients: a peer that goes on to the next round before its "
                "gradients are averaged cannot take them into it"
            )

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Set the quorum."""
        if values[self.name] is not None:
            arguments[self.name] = int(values[self.name])

    def label(self, value: Any) -> str:
        """Return the quorum, or nothing if all peers are awaited."""
        return "" if value is None else f"quorum{value}"
