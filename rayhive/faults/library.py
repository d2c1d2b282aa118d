"""Scenarios by name, and from a name and a seed to a fault plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rayhive.errors import ConfigError, Problem
from rayhive.faults.generators.base import Draft, Setting
from rayhive.faults.scenario import Scenario, member_name, read_scenario_file
from rayhive.faults.validation import check_drafts, completed_args
from rayhive.registry import SCENARIOS
from rayhive.spec import Budget, SwarmConfig, is_path
from rayhive.spec.fault_plan import FaultPlan, PlannedFault

_HERE = Path(__file__).parent
#: Where the files of the library are: in an installed package beside this, in a checkout where
#: people look for them.
PLACES = (_HERE / "scenarios", _HERE.parents[1] / "experiments" / "scenarios")


def register_library() -> None:
    """Enter every scenario of the library; only files with a grid are read for it."""
    folder = next((place for place in PLACES if place.is_dir()), None)
    for path in sorted(folder.glob("*.yaml")) if folder is not None else ():
        if "\ngrid:" not in path.read_text(encoding="utf-8"):
            SCENARIOS.register(path.stem)(_Entry(path))
            continue
        file = read_scenario_file(path)
        SCENARIOS.register(path.stem)(_Entry(path))
        for parameter, values in file.grid.items():
            for value in values:
                SCENARIOS.register(member_name(path.stem, value))(_Entry(path, {parameter: value}))


class _Entry:
    """A scenario of the library, read when it is asked for."""

    def __init__(self, path: Path, given: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._given = dict(given or {})

    def load(self) -> Scenario:
        """Return the scenario.

        Raises:
            ConfigError: With every mistake in its file.
        """
        stem = self._path.stem
        name = member_name(stem, next(iter(self._given.values()))) if self._given else stem
        return Scenario(name, self._path, _read(self._path), self._given)


@cache
def _read(path: Path) -> Any:
    return read_scenario_file(path)


def label(name_or_path: str) -> str:
    """Return the name of a scenario that is given by name or path."""
    return Path(name_or_path).stem if is_path(name_or_path) else name_or_path


def load_scenario(name_or_path: str | Path, key: str = "NAME") -> Scenario:
    """Return a scenario of the library, or the user's own.

    Args:
        name_or_path: A registered name, or the path of a scenario file.
        key: Where that was given, for the message.

    Raises:
        ConfigError: There is no such scenario, or its file is wrong.
    """
    name = str(name_or_path)
    if is_path(name):
        path = Path(name)
        return Scenario(path.stem, path, read_scenario_file(path), {})
    entry = SCENARIOS.get(name, key)
    found: Scenario = entry.load()
    return found


def plan_of(
    name_or_path: str | Path,
    *,
    seed: int,
    peers: int,
    swarm: SwarmConfig,
    budget: Budget,
    args: Mapping[str, Any] | None = None,
    allows: Callable[[str], bool] = lambda kind: True,
    warnings: list[str] | None = None,
) -> FaultPlan:
    """Return the plan that a scenario makes of a seed.

    It depends on nothing else than the arguments and the files: the same are the same, byte for
    byte, in every process and on every machine.

    Args:
        name_or_path: A registered name, or the path of a scenario file.
        seed: Seed of its choices.
        peers: Peers that start together.
        swarm: The swarm; its ``peers`` are those of ``peers``.
        budget: When a replicate ends.
        args: Parameters that differ from the scenario's.
        allows: Says whether the machine allows a kind, for scenarios that take only such kinds.
        warnings: Gets what is odd about its files, but no mistake.

    Raises:
        ConfigError: With everything that is wrong with the scenario, or with its use here.
    """
    scenario = load_scenario(name_or_path)
    given = dict(args or {})
    problems = list(scenario.check_args(given))
    if scenario.members and not set(scenario.file.grid) & set(given):
        members = ", ".join(scenario.members)
        problems.append(Problem("NAME", scenario.name, f"one of what it stands for: {members}"))
    if peers < scenario.file.peers.least:
        problems.append(Problem("peers", peers, f"at least {scenario.file.peers.least}"))
    if problems:
        raise ConfigError(problems, str(name_or_path))
    setting = Setting(
        scenario=scenario.path.stem,
        seed=seed,
        swarm=swarm.model_copy(update={"peers": peers}),
        budget=budget,
        folder=scenario.path.parent,
        allows=allows,
        warnings=[] if warnings is None else warnings,
    )
    generators = scenario.generators({**scenario.args, **given})
    drafts = [draft for generator in generators for draft in generator.drafts(setting)]
    drafts.sort(key=_in_order)
    found = setting.problems
    complete = [completed_args(draft, found) for draft in drafts]
    found.extend(check_drafts(drafts, setting.swarm, budget))
    if found:
        raise ConfigError(found, str(name_or_path))
    bounds = [bound for g in generators if (bound := g.at_most(peers)) is not None]
    return FaultPlan(
        scenario=scenario.name,
        seed=seed,
        peers=peers,
        at_most=min(bounds, default=None),
        faults=tuple(
            PlannedFault(
                id=f"f{index}",
                kind=draft.kind,
                who=draft.who,
                at=draft.at,
                heal_after_s=draft.heal_after_s,
                args=values,
            )
            for index, (draft, values) in enumerate(zip(drafts, complete, strict=True))
        ),
    )


def _in_order(draft: Draft) -> tuple[bool, float]:
    """Put faults in the order of firing; how rounds and seconds mix is not known before."""
    at = draft.at
    return at.round is None, float(at.round if at.round is not None else at.seconds or 0.0)


def with_members(names: Sequence[str]) -> tuple[str, ...]:
    """Return scenarios with each grid replaced by what it stands for."""
    found: list[str] = []
    for name in names:
        by_name = not is_path(name) and name in SCENARIOS
        members = load_scenario(name).members if by_name else ()
        found.extend(members or (name,))
    return tuple(dict.fromkeys(found))
