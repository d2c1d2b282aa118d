"""The scenario library, and the expansion of a scenario and a seed into a fault plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from rayhive.errors import ConfigError, Problem
from rayhive.faults.generators.base import Setting
from rayhive.faults.scenario import Scenario, member_name, read_scenario_file
from rayhive.faults.validation import check_drafts, completed_args
from rayhive.registry import SCENARIOS
from rayhive.spec import Budget, SwarmConfig
from rayhive.spec.fault_plan import FaultPlan, PlannedFault
from rayhive.spec.study import is_path

_HERE = Path(__file__).parent
#: Folders of the library's files: beside this module in an installed package, and under
#: ``experiments/`` in a checkout.
PLACES = (_HERE / "scenarios", _HERE.parents[1] / "experiments" / "scenarios")


def register_library() -> None:
    """Register every scenario of the library. Only files with a grid are read now."""
    folder = next((place for place in PLACES if place.is_dir()), None)
    for path in sorted(folder.glob("*.yaml")) if folder is not None else ():
        SCENARIOS.register(path.stem)(partial(_scenario, path))
        if "\ngrid:" in path.read_text(encoding="utf-8"):
            for parameter, values in _read(path).grid.items():
                for value in values:
                    name = member_name(path.stem, value)
                    SCENARIOS.register(name)(partial(_scenario, path, name, {parameter: value}))


def _scenario(
    path: Path, name: str | None = None, given: Mapping[str, Any] | None = None
) -> Scenario:
    return Scenario(name or path.stem, path, _read(path), given or {})


_read = cache(read_scenario_file)


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Return a scenario of the library, or one from the user's file.

    Args:
        name_or_path: A registered name, or the path of a scenario file.

    Raises:
        ConfigError: There is no such scenario, or its file is invalid.
    """
    name = str(name_or_path)
    if is_path(name):
        return Scenario(Path(name).stem, Path(name), read_scenario_file(Path(name)), {})
    scenario: Scenario = SCENARIOS.get(name, "NAME")()
    return scenario


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
    """Expand a scenario into its plan for a seed.

    The plan depends on the arguments and the files only. Equal inputs give equal bytes in every
    process and on every machine.

    Args:
        name_or_path: A registered name, or the path of a scenario file.
        seed: Seed of the random choices.
        peers: Peers that start together; overrides ``swarm.peers``.
        swarm: The swarm.
        budget: Limits of a replicate.
        args: Parameters that override the scenario's defaults.
        allows: Returns whether the target allows a kind, for scenarios with ``available_only``.
        warnings: Receives warnings about the scenario's files.

    Raises:
        ConfigError: The scenario or its use here is invalid; lists every problem.
    """
    scenario = load_scenario(name_or_path)
    given = dict(args or {})
    problems = list(scenario.check_args(given))
    if scenario.members and not set(scenario.file.grid) & set(given):
        members = ", ".join(scenario.members)
        problems.append(Problem("NAME", scenario.name, f"one member of the grid: {members}"))
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
    # Rounds come first, as their times are unknown before the run.
    drafts.sort(key=lambda draft: (draft.at.round is None, draft.at.round or draft.at.seconds or 0))
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
