"""Contract of a generator, and the models of drawn values."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rayhive.errors import Problem
from rayhive.faults.queries import kind_of
from rayhive.faults.rng import SeededRng
from rayhive.spec import Budget, Model, SwarmConfig
from rayhive.spec.fault_plan import At


@dataclass(frozen=True)
class Draft:
    """A fault before it has its id in the plan.

    Attributes:
        kind: Name of the kind.
        who: Names of peers or nodes, or one role.
        at: Time of the injection.
        heal_after_s: Time from the injection to the heal [s].
        args: Parameters that override the kind's defaults.
        key: Key in the scenario file, for problems.
    """

    kind: str
    who: tuple[str, ...]
    at: At
    heal_after_s: float | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    key: str = "plan"


@dataclass(frozen=True)
class Setting:
    """Context in which a plan is generated.

    Attributes:
        scenario: Name that seeds the choices; the members of a grid share it.
        seed: Seed of the choices.
        swarm: The swarm; its ``peers`` start together.
        budget: Limits of a replicate.
        folder: Folder of the scenario file, for relative paths.
        allows: Returns whether the machine allows a kind, for plans with ``available_only``.
        problems: Receives problems.
        warnings: Receives warnings.
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
        """Return the random stream for one decision of the plan."""
        return SeededRng(self.scenario, self.seed, *parts)


class Generator(Model, ABC):
    """A way to plan faults. Its only field is its section of a scenario file."""

    @abstractmethod
    def may_plan(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return the kinds that it may plan, each with the parameters as they are written."""

    def at_most(self, peers: int) -> int | None:
        """Return the bound on peers that are faulted at once; None for no bound."""
        return None

    @abstractmethod
    def drafts(self, setting: Setting) -> Iterator[Draft]:
        """Yield the planned faults; problems go to ``setting.problems``."""


def _span(value: object) -> object:
    """Read a constant as a range of one value."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"between": (value, value)}
    return value


class _Span(Model):
    """A range from which one number is drawn.

    Attributes:
        between: Least and greatest value; two integers give integers.
    """

    between: tuple[int | float, int | float]

    @model_validator(mode="after")
    def _ordered(self) -> _Span:
        if not 0 <= self.between[0] <= self.between[1]:
            raise ValueError("a range from the least to the greatest value, neither negative")
        return self

    def of(self, draw: SeededRng) -> float:
        """Draw one value."""
        return draw.between(*self.between)

    def seconds(self, draw: SeededRng) -> float:
        """Draw one value as a float, also between two integers."""
        return draw.between(*map(float, self.between))


Span = Annotated[_Span, BeforeValidator(_span)]


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


#: Parameters of a kind, some of them drawn from a range or a list.
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
    name: str, heal: _Span | None, args: Mapping[str, Any], draw: SeededRng
) -> float | None:
    """Return the time from an injection to the heal [s].

    Args:
        name: Kind of the fault. The notice of a kind that gives one is added to ``heal``.
        heal: Time from the end of the notice to the heal [s].
        args: Parameters of the fault.
        draw: Random stream for the choice.
    """
    if heal is None:
        return None
    kind = kind_of(name)
    return round(heal.seconds(draw) + (0.0 if kind is None else kind.notice_s(args)), 3)


def target_type_of(name: str) -> str:
    """Return whether a kind acts on a ``peer`` or a ``node``; an unknown one counts as a peer's."""
    kind = kind_of(name)
    return "peer" if kind is None else kind.target_type
