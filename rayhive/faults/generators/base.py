"""Contract of a generator: from its section of a scenario file to drafts of faults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayhive.errors import Problem
from rayhive.faults.drawing import Between, SeededRng
from rayhive.faults.kind import kind_of
from rayhive.spec import Budget, Model, SwarmConfig
from rayhive.spec.fault_plan import At

#: Word -> number of targets among n peers. ``all`` leaves joiners only.
COUNTS: dict[str, Callable[[int], int]] = {
    "one": lambda n: min(1, n),
    "minority": lambda n: max(0, (n - 1) // 2),
    "half": lambda n: n // 2,
    "majority": lambda n: n // 2 + 1 if n else 0,
    "all": lambda n: n,
}


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

    def problem(self, field: str, value: object, allowed: str) -> Problem:
        """Return a problem of one field of the fault."""
        return Problem(f"{self.key}.{field}", value, allowed)


@dataclass(frozen=True)
class Setting:
    """Context in which a plan is generated.

    Attributes:
        scenario: Name that seeds the choices; the members of a grid share it.
        seed: Seed of the choices.
        swarm: The swarm; its ``peers`` start together.
        budget: Limits of a replicate.
        folder: Folder of the scenario file, for relative paths.
        allows: Returns whether the target allows a kind, for plans with ``available_only``.
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

    @property
    def available_only(self) -> bool:
        """Whether kinds that the target does not allow are left out."""
        return False

    def at_most(self, peers: int) -> int | None:
        """Return the bound on peers that are faulted at once; None for no bound."""
        return None

    @abstractmethod
    def drafts(self, setting: Setting) -> Iterator[Draft]:
        """Yield the planned faults; problems go to ``setting.problems``."""


def heal_after_s(
    kind: str, heal: Between | None, args: Mapping[str, Any], draw: SeededRng
) -> float | None:
    """Return the time from an injection to the heal [s].

    Args:
        kind: Kind of the fault. The notice of a kind that gives one is added to ``heal``.
        heal: Time from the end of the notice to the heal [s].
        args: Parameters of the fault.
        draw: Random stream for the choice.
    """
    return None if heal is None else round(heal.seconds(draw) + kind_of(kind).notice_s(args), 3)
