"""What all generators share: what they are told, what they give back, and values in ranges."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rayhive.errors import Problem
from rayhive.faults.queries import notice_of
from rayhive.faults.rng import SeededRng
from rayhive.registry import FAULTS
from rayhive.spec import Budget, Model, SwarmConfig
from rayhive.spec.fault_plan import At


@dataclass(frozen=True)
class Draft:
    """A fault before it has its number in the plan.

    Attributes:
        kind: Its kind.
        who: Names, or one role.
        at: When.
        heal_after_s: Time from the injection to the heal [s].
        args: Parameters that differ from the kind's defaults.
        key: Where it stands in the scenario file, for problems.
    """

    kind: str
    who: tuple[str, ...]
    at: At
    heal_after_s: float | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    key: str = "plan"


@dataclass(frozen=True)
class Setting:
    """What a plan is made for.

    Attributes:
        scenario: Name that choices are drawn under; variants of a scenario share it.
        seed: Seed of the choices.
        swarm: The swarm, with as many peers as start together.
        budget: When a replicate ends.
        folder: Folder of the scenario file, for files that it names.
        allows: Says whether the machine allows a kind, for plans that take only such kinds.
        problems: Gets what is wrong.
        warnings: Gets what is odd, but no mistake.
    """

    scenario: str
    seed: int
    swarm: SwarmConfig
    budget: Budget
    folder: Path
    allows: Callable[[str], bool] = lambda kind: True
    problems: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def draw(self, *parts: object) -> SeededRng:
        """Return the stream of choices for one thing of the plan."""
        return SeededRng(self.scenario, self.seed, *parts)


class Generator(Model, ABC):
    """One way to plan faults; its only field is its section of a scenario file."""

    @abstractmethod
    def may_plan(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the kinds that it may plan, each with its parameters as they are written."""

    def at_most(self, peers: int) -> int | None:
        """Return how many of the peers it wants to be struck at once at most, None for any."""
        return None

    @abstractmethod
    def drafts(self, setting: Setting) -> Iterator[Draft]:
        """Yield the faults that it plans; what is wrong goes to ``setting.problems``."""


def _span(value: object) -> object:
    """Read a constant as a range of one value."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"between": (value, value)}
    return value


class _Span(Model):
    """A number, or a range of which one is drawn.

    Attributes:
        between: Least and greatest value; whole ends give whole numbers.
    """

    between: tuple[int | float, int | float]

    @model_validator(mode="after")
    def _ordered(self) -> _Span:
        if not 0 <= self.between[0] <= self.between[1]:
            raise ValueError("a range from the least to the greatest value, neither negative")
        return self

    def of(self, draw: SeededRng) -> float:
        """Return one value."""
        return draw.between(*self.between)

    def seconds(self, draw: SeededRng) -> float:
        """Return one value, never rounded to a whole one."""
        return draw.between(*map(float, self.between))


Span = Annotated[_Span, BeforeValidator(_span)]


class When(Model):
    """A moment, or a range of moments; exactly one of the two.

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
        """Return one moment."""
        if self.round is not None:
            return At(round=int(self.round.of(draw)))
        assert self.seconds is not None
        return At(seconds=self.seconds.seconds(draw))


def _words(value: object) -> object:
    return (value,) if isinstance(value, str) else value


Who = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_words)]


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


#: Parameters of a kind, some of them left to the seed.
DrawnArgs = Annotated[dict[str, Any], AfterValidator(_check_choices)]


def drawn_args(args: Mapping[str, Any], draw: Callable[[str], SeededRng]) -> dict[str, Any]:
    """Return parameters with their ranges (``between``) and choices (``choose``) drawn."""
    return {name: _drawn(value, draw(name)) for name, value in args.items()}


def _drawn(value: Any, draw: SeededRng) -> Any:
    if isinstance(value, Mapping) and set(value) == {"between"}:
        return draw.between(*value["between"])
    if isinstance(value, Mapping) and set(value) == {"choose"}:
        return draw.choose(value["choose"])
    return value


def heal_of(
    kind: str, heal: _Span | None, args: Mapping[str, Any], draw: SeededRng
) -> float | None:
    """Return the time from an injection to the heal [s].

    Args:
        kind: The kind; if it gives a notice, that comes before the time of ``heal``.
        heal: Time from when the fault has hold to the heal [s].
        args: Parameters of the fault.
        draw: Makes the choice.
    """
    if heal is None:
        return None
    return round(heal.seconds(draw) + notice_of(kind, args), 3)


def unit_of(kind: str) -> str:
    """Return whether a kind is done to a ``peer`` or a ``node``; unknown ones to a peer."""
    return str(FAULTS.get(kind).targets) if kind in FAULTS else "peer"
