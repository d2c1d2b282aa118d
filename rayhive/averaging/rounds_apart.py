"""Weights of parameters after a partition, by the rounds that each side committed on its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from statistics import fmean
from typing import Any, TypeVar

P = TypeVar("P", bound=Hashable)

#: Weight of a side of a partition that committed no rounds. Non-zero, so that the weights do not
#: sum to 0 if no side did.
LEAST_ROUNDS = 1e-6


def weights(gathered: Mapping[P, tuple[tuple[str, ...], int | None]]) -> dict[P, float]:
    """Return the weight of each peer's parameters, relative to the largest one.

    The peers of one side of a partition have the same parameters. Each of them therefore gets an
    equal share of the rounds of its side. A peer that was in no partition gets the mean weight of
    the peers that were.

    Args:
        gathered: For each peer, the members of its side of the partition, and the number of
            rounds that it committed during the partition; None if it was in none.
    """
    rounds: dict[tuple[str, ...], int] = {}
    for side, apart in gathered.values():
        if apart is not None:
            rounds[side] = max(rounds.get(side, 0), apart)
    if not rounds:
        return dict.fromkeys(gathered, 1.0)
    sizes = Counter(side for side, apart in gathered.values() if apart is not None)
    shares = {side: max(done, LEAST_ROUNDS) / sizes[side] for side, done in rounds.items()}
    usual = fmean(shares[side] for side, apart in gathered.values() if apart is not None)
    found = {p: usual if apart is None else shares[side] for p, (side, apart) in gathered.items()}
    return {peer: share / max(found.values()) for peer, share in found.items()}


def parameter_weight(weight: float, own: Any, gathered: Mapping[Any, Any]) -> float:
    """Return the weight of a peer's parameters in a round.

    Args:
        weight: Weight of its step.
        own: The peer.
        gathered: Data of each peer of the group: the round, the members of the peer's side of a
            partition and the rounds that it committed there. Other data are left out.
    """
    found = {
        peer: (tuple(content[1]), content[2])
        for peer, content in gathered.items()
        if isinstance(content, (list, tuple)) and len(content) == 3
    }
    return weight * weights(found)[own] if weight and own in found else weight
