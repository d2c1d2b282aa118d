"""Scenario files: their model and their reading."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from pydantic import Field, ValidationError

from rayhive.errors import ConfigError, Problem, nearest, unknown
from rayhive.faults.generators import GENERATORS
from rayhive.faults.generators.base import Generator
from rayhive.faults.kind import needs_of
from rayhive.spec import Model
from rayhive.spec.loading import as_problem
from rayhive.spec.yaml_data import read_mapping

#: Sections of a study for which a scenario may give defaults.
STUDY_KEYS = ("workload", "swarm", "space", "budget", "evaluation")
#: Default training time of a scenario [s].
DEFAULT_SECONDS = 45.0

_PLACEHOLDER = re.compile(r"\$(\w+)")


class PeerCounts(Model):
    """Number of peers of a scenario.

    Attributes:
        least: Smallest number for which the scenario has a meaning.
        default: Number that ``rayhive scenario run`` uses.
    """

    least: int = Field(default=1, ge=1)
    default: int = Field(default=4, ge=1)


class ScenarioFile(Model):
    """Content of a scenario file.

    Attributes:
        about: Summary in one sentence; ``$name`` is replaced by a parameter.
        peers: Number of peers.
        args: Parameters and their defaults. A value ``$name`` in ``plan`` is replaced by one.
        grid: One parameter with values, each of which gives a scenario of its own.
        study: Defaults of the study that ``rayhive scenario run`` runs.
        plan: Generator -> its settings. Several generators add up.
    """

    about: str = Field(min_length=1)
    peers: PeerCounts = PeerCounts()
    args: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, tuple[Any, ...]] = Field(default_factory=dict, max_length=1)
    study: dict[str, Any] = Field(default_factory=dict)
    plan: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """A scenario that can be planned, or a grid of scenarios.

    Attributes:
        name: Name in rows of results.
        path: The file.
        file: Its content.
        given: Parameters of this member of a grid; empty for other scenarios.
    """

    name: str
    path: Path
    file: ScenarioFile
    given: Mapping[str, Any]

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members of a grid; empty if the scenario is no grid."""
        values = () if self.given else next(iter(self.file.grid.values()), ())
        return tuple(member_name(self.path.stem, value) for value in values)

    def about(self, args: Mapping[str, Any] | None = None) -> str:
        """Return the summary in one sentence.

        Args:
            args: Parameters that override the scenario's.
        """
        listed = {}
        if self.members:
            listed = {name: "/".join(map(str, found)) for name, found in self.file.grid.items()}
        return Template(self.file.about).safe_substitute({**self.args, **listed, **(args or {})})

    @property
    def args(self) -> dict[str, Any]:
        """Values of all parameters."""
        return {**self.file.args, **self.given}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Fault kinds that it may plan."""
        return tuple(sorted(self.needs))

    @property
    def needs(self) -> dict[str, frozenset[str]]:
        """Capabilities that each fault kind of :attr:`kinds` needs."""
        return needs_of(self.may_plan())

    def may_plan(
        self, args: Mapping[str, Any] | None = None, optional: bool | None = None
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the fault kinds that it may plan, with their parameters as they are written.

        Args:
            args: Parameters that override the scenario's.
            optional: Whether the plan leaves the kinds out where they are not available; None
                yields the kinds of both sorts.
        """
        for generator in self.generators({**self.args, **(args or {})}):
            if optional in (None, generator.available_only):
                yield from generator.may_plan()

    @property
    def seconds(self) -> float:
        """Training time of one run with the scenario's own budget [s]."""
        budget = self.file.study.get("budget") or {}
        return float(budget.get("seconds_per_replicate", DEFAULT_SECONDS))

    @property
    def study(self) -> dict[str, Any]:
        """A study of this scenario alone, as data of a study file."""
        given = self.file.study
        return {
            "name": self.name,
            "workload": {"name": "digits"},
            **given,
            "swarm": {"peers": self.file.peers.default, **(given.get("swarm") or {})},
            "scenarios": [self.name],
            "replicates": 1,
            "budget": {
                "trials": 1,
                "seconds_per_replicate": DEFAULT_SECONDS,
                **(given.get("budget") or {}),
            },
        }

    def generators(self, args: Mapping[str, Any]) -> list[Generator]:
        """Return the generators of its plan.

        Args:
            args: Values of all parameters.

        Raises:
            ConfigError: The file's ``plan`` is invalid with these values.
        """
        problems: list[Problem] = []
        found: list[Generator] = []
        plan = _filled(self.file.plan, args, "plan", problems)
        for name, value in () if problems else sorted(plan.items()):
            if name not in GENERATORS:
                problems.append(unknown(f"plan.{name}", name, GENERATORS.names()))
                continue
            model: type[Generator] = GENERATORS.get(name)
            try:
                found.append(model.model_validate({name: value}))
            except ValidationError as error:
                wrong = (as_problem(item, model) for item in error.errors())
                problems.extend(replace(each, key=f"plan.{each.key}") for each in wrong)
        if problems:
            raise ConfigError(problems, str(self.path))
        return found

    def check_args(self, args: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield the names that are no parameters of the scenario."""
        for name in args:
            if name not in self.file.args:
                allowed = f"a parameter; known are {', '.join(self.file.args) or 'none'}"
                yield Problem(f"args.{name}", args[name], allowed, nearest(name, [*self.file.args]))


def member_name(stem: str, value: object) -> str:
    """Return the name of a grid's member with ``value``."""
    return f"{stem}-{value:g}" if isinstance(value, float) else f"{stem}-{value}"


def read_scenario_file(path: Path) -> ScenarioFile:
    """Read a scenario file. Its ``plan`` is validated later, by :meth:`Scenario.generators`.

    Raises:
        ConfigError: The rest of the file is invalid; lists every problem.
    """
    problems: list[Problem] = []
    data = read_mapping(path, problems)
    try:
        file = ScenarioFile.model_validate(data)
        problems.extend(_check_file(file))
    except ValidationError as error:
        problems.extend(as_problem(item, ScenarioFile) for item in error.errors())
    if problems:
        raise ConfigError(problems, str(path))
    return file


def _check_file(file: ScenarioFile) -> Iterator[Problem]:
    if file.peers.default < file.peers.least:
        yield Problem("peers.default", file.peers.default, f"at least {file.peers.least}")
    for key in file.study:
        if key not in STUDY_KEYS:
            yield unknown(f"study.{key}", key, STUDY_KEYS)
    for name, values in file.grid.items():
        if name not in file.args:
            yield unknown(f"grid.{name}", name, file.args)
        if len(set(map(str, values))) != len(values) or not values:
            yield Problem(f"grid.{name}", list(values), "different values, at least one")


def _filled(value: Any, args: Mapping[str, Any], key: str, problems: list[Problem]) -> Any:
    """Return ``value`` with each ``$name`` replaced by the parameter."""
    if isinstance(value, Mapping):
        return {
            name: _filled(item, args, f"{key}.{name}", problems) for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_filled(item, args, f"{key}.{index}", problems) for index, item in enumerate(value)]
    found = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    if found[1] not in args:
        problems.append(unknown(key, value, [f"${name}" for name in args]))
        return value
    return args[found[1]]
