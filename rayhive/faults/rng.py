"""Seeded choices that are equal in every process and every version of Python."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class SeededRng:
    """A random stream for one decision.

    Each decision has its own stream, so that a further decision does not change the others. Only
    :meth:`random.Random.random` is used: it is the only method of that module documented to
    return the same for the same seed in later versions.

    Args:
        parts: Identity of the decision: texts, numbers, and lists and mappings of them.
    """

    def __init__(self, *parts: object) -> None:
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        self._random = random.Random(int.from_bytes(digest, "big"))

    def below(self, count: int) -> int:
        """Return an integer from 0 to ``count`` - 1."""
        return int(self._random.random() * count)

    def between(self, low: float, high: float) -> float:
        """Return a number from a range: an integer if both ends are, else with three decimals."""
        if low == high:
            return low
        if isinstance(low, int) and isinstance(high, int):
            return low + self.below(high - low + 1)
        return round(low + (high - low) * self._random.random(), 3)

    def choose(self, items: Sequence[T]) -> T:
        """Return one of ``items``."""
        return items[self.below(len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """Return ``count`` of ``items``, in their order."""
        left = list(range(len(items)))
        chosen = [left.pop(self.below(len(left))) for _ in range(count)]
        return [items[index] for index in sorted(chosen)]

    def weighted(self, weights: Sequence[float]) -> int:
        """Return an index into ``weights``, drawn with probability proportional to the weight."""
        point = self._random.random() * sum(weights)
        for index, weight in enumerate(weights):
            point -= weight
            if point < 0:
                return index
        return len(weights) - 1
