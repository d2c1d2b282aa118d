"""Seeded choices, and the models of values that are drawn: numbers, moments, parameters."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, model_validator

from rayhive.spec import Model
from rayhive.spec.fault_plan import At

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


class Between(Model):
    """A range from which one number is drawn.

    Attributes:
        between: Least and greatest value; two integers give integers.
    """

    between: tuple[int | float, int | float]

    @model_validator(mode="after")
    def _ordered(self) -> Between:
        if not 0 <= self.between[0] <= self.between[1]:
            raise ValueError("a range from the least to the greatest value, neither negative")
        return self

    def of(self, draw: SeededRng) -> float:
        """Draw one value."""
        return draw.between(*self.between)

    def seconds(self, draw: SeededRng) -> float:
        """Draw one value as a float, also between two integers."""
        return draw.between(*map(float, self.between))


def _constant(value: object) -> object:
    """Read a constant as a range of one value."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"between": (value, value)}
    return value


#: A range, or a constant.
Span = Annotated[Between, BeforeValidator(_constant)]


class When(Model):
    """A moment or a range of moments, as round or time; exactly one of the two.

    Attributes:
        round: The round.
        seconds: Time since training started [s].
    """

    round: Span | None = None
    seconds: Span | None = None

    @model_validator(mode="after")
    def _one(self) -> When:
        if (self.round is None) == (self.seconds is None):
            raise ValueError("exactly one of round and seconds")
        if self.round is not None:
            low, high = self.round.between
            if not (isinstance(low, int) and isinstance(high, int) and low >= 1):
                raise ValueError("a round is a whole number, at least 1")
        return self

    def of(self, draw: SeededRng) -> At:
        """Draw one moment."""
        if self.round is not None:
            return At(round=int(self.round.of(draw)))
        assert self.seconds is not None
        return At(seconds=self.seconds.seconds(draw))


def _check_choices(args: dict[str, Any]) -> dict[str, Any]:
    for name, value in args.items():
        if isinstance(value, Mapping) and set(value) <= {"between", "choose"}:
            ends, choices = value.get("between"), value.get("choose")
            if len(value) != 1 or not (_is_range(ends) or (isinstance(choices, list) and choices)):
                raise ValueError(f"{name}: either between: [low, high] or choose: [a, b, ...]")
    return args


def _is_range(ends: object) -> bool:
    if not isinstance(ends, list) or len(ends) != 2:
        return False
    numbers = [end for end in ends if isinstance(end, (int, float)) and math.isfinite(end)]
    return len(numbers) == 2 and numbers[0] <= numbers[1]


#: Parameters of a kind, some of them drawn from a range or a list.
DrawnArgs = Annotated[dict[str, Any], AfterValidator(_check_choices)]


def drawn_args(args: Mapping[str, Any], draw: Callable[[str], SeededRng]) -> dict[str, Any]:
    """Return parameters with their ranges (``between``) and choices (``choose``) drawn."""

    def drawn(name: str, value: Any) -> Any:
        if isinstance(value, Mapping) and set(value) == {"between"}:
            return draw(name).between(*value["between"])
        if isinstance(value, Mapping) and set(value) == {"choose"}:
            return draw(name).choose(value["choose"])
        return value

    return {name: drawn(name, value) for name, value in args.items()}
