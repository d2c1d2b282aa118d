"""Functions that list, plan and run scenarios, and run a recorded replicate again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayhive.api.run import Run, load
from rayhive.api.story import StoryProgress
from rayhive.api.studies import execute
from rayhive.cluster.node import capabilities
from rayhive.errors import Problem
from rayhive.faults.library import load_scenario
from rayhive.faults.scenario import Scenario
from rayhive.registry import SCENARIOS
from rayhive.remote import local_folder
from rayhive.spec import SweepConfig, validate_sweep
from rayhive.spec.fault_plan import FaultPlan
from rayhive.spec.study import scenario_label
from rayhive.spec.yaml_data import Overrides, apply_overrides, read_mapping
from rayhive.sweep.replay import recorded_spec, run_again
from rayhive.sweep.resolve import fault_needs, plan_replicate, resolve
from rayhive.sweep.signals import Interrupted, Interruption

if TYPE_CHECKING:
    from rayhive.sweep.driver import Progress


@dataclass(frozen=True)
class PlannedScenario:
    """Fault plan of one scenario.

    Attributes:
        name: Name of the scenario.
        about: Summary in one sentence.
        plan: The plan of replicate 0.
        seconds: Duration of a replicate [s].
        warnings: Warnings about the trace that the plan was made from.
    """

    name: str
    about: str
    plan: FaultPlan
    seconds: float
    warnings: tuple[str, ...]


def list_scenarios() -> list[tuple[Scenario, list[Problem]]]:
    """Return the scenarios of the library, each with the faults that this machine cannot inject.

    A grid is listed once, without its members.
    """
    found = [load_scenario(name) for name in SCENARIOS.names()]
    here = capabilities.here()
    return [(each, capabilities.missing(each.needs, here)) for each in found if not each.given]


def plan_scenario(
    name: str,
    *,
    seed: int | None = None,
    peers: int | None = None,
    config: str | Path | None = None,
    set: Overrides = (),
) -> tuple[list[PlannedScenario], list[Problem]]:
    """Return the fault plans of a scenario, one for each scenario that it stands for.

    Args:
        name: Name of a scenario of the library, or the path of a scenario file.
        seed: Seed of the study; by default that of ``set`` or ``config``, else 0.
        peers: Peers that start together; by default the scenario's.
        config: A study whose swarm, workload and budget replace the scenario's.
        set: Values that replace single fields of the study.

    Returns:
        The plans, and the reasons why this machine cannot run the scenario.

    Raises:
        ConfigError: Bad input, with every mistake.
    """
    planned, here = [], capabilities.here()
    needs: dict[str, frozenset[str]] = {}
    for member in load_scenario(name).members or (name,):
        scenario = load_scenario(member)
        study = scenario_config(member, config, set, peers, seed)
        warnings: list[str] = []
        lacking = capabilities.missing(fault_needs(study, [member], optional=True), here)
        absent = {str(problem.value) for problem in lacking}
        plan = plan_replicate(study, member, 0, warnings, absent)
        needs |= fault_needs(study, [member], optional=False)
        seconds = study.budget.seconds_per_replicate
        about = scenario.about(study.scenario_args.get(scenario_label(member)))
        planned.append(PlannedScenario(scenario.name, about, plan, seconds, tuple(warnings)))
    return planned, capabilities.missing(needs, here)


def run_scenario(
    name: str,
    *,
    seed: int | None = None,
    peers: int | None = None,
    config: str | Path | None = None,
    set: Overrides = (),
    address: str | None = None,
    out: str | Path | None = None,
    twin: bool = True,
    progress: bool | Progress = True,
) -> Run:
    """Run one scenario on one configuration, and return its results.

    Args:
        name: Name of a scenario of the library, or the path of a scenario file.
        seed: Seed of the fault plan, the data and the parameters; by default that of ``set`` or
            ``config``, else 0.
        peers: Peers that start together; by default the scenario's.
        config: A study whose swarm, workload and budget replace the scenario's.
        set: Values that replace single fields of the study.
        address: ``HOST:PORT`` of a running Ray cluster, or ``auto``; by default ``RAY_ADDRESS``, or
            else a Ray on this machine that ends with the call.
        out: The run folder, or its URL; by default ``runs/NAME-TIME``.
        twin: Whether the same replicate runs without faults first, for the columns that compare.
        progress: Whether faults and recoveries are shown as they happen, or an object that shows
            progress.

    Returns:
        The results; :meth:`Run.stories` tells what broke and how it recovered.

    Raises:
        ConfigError: Bad input, with every mistake; nothing has been started or written.
        RayhiveError: The scenario could not be run.
        Interrupted: Ctrl-C or SIGTERM.
    """
    study = scenario_config(name, config, set, peers, seed)
    study = study.model_copy(update={"twins": study.twins and twin})
    resolved = resolve(study, source=None if config is None else str(config))
    folder = out if out is not None else new_folder(resolved.config.name)
    return execute(resolved, folder, address, nullcontext(_shown(progress)))


def replay(
    folder: str | Path,
    trial: int | str,
    *,
    replicate: int = 0,
    scenario: str | None = None,
    address: str | None = None,
    out: str | Path | None = None,
    progress: bool | Progress = True,
) -> Run:
    """Run a recorded replicate again, with the recorded spec and fault plan.

    The code and the data of the workload are those of now, in the working directory of now.

    Args:
        folder: The run folder, or its URL.
        trial: Number of the trial.
        replicate: Number of the replicate.
        scenario: Its scenario; by default the only one of the trial that has faults.
        address: As for :func:`run_scenario`.
        out: Folder of the new replicate; by default ``runs/replay-TIME``.
        progress: As for :func:`run_scenario`.

    Returns:
        The results of the new replicate.

    Raises:
        ConfigError: The replicate does not exist, ``out`` holds one, or its workload cannot be
            loaded.
        RayhiveError: The replicate could not be run.
        Interrupted: Ctrl-C or SIGTERM; its ``folder`` is that of the new replicate.
    """
    place = Path(out) if out is not None else new_folder("replay")
    recorded = local_folder(folder)
    spec = recorded_spec(recorded, trial, replicate, scenario, out=place)
    try:
        with Interruption() as interruption:
            run_again(spec, recorded, _shown(progress), interruption, address)
    except Interrupted as stop:
        stop.folder, stop.kept = place, "the unfinished replicate is"
        raise
    return load(place)


def new_folder(name: str) -> Path:
    """Return a new run folder ``runs/NAME-TIME``, for runs that are never resumed."""
    from rayhive.sweep.sweep import default_folder

    return default_folder(f"{name}-{datetime.now():%Y%m%d-%H%M%S}")


def _shown(progress: bool | Progress) -> Progress:
    return StoryProgress(progress) if isinstance(progress, bool) else progress


def scenario_config(
    name: str,
    file: str | Path | None = None,
    overrides: Overrides = (),
    peers: int | None = None,
    seed: int | None = None,
) -> SweepConfig:
    """Return the study of one scenario: the scenario's defaults, then the user's settings.

    Args:
        name: Name of the scenario, or the path of its file.
        file: A study whose settings replace the scenario's. Its other scenarios, further
            configurations and replicates, its baselines and its storage are left out: a storage
            keeps a study for one run folder.
        overrides: Values that replace single fields.
        peers: Peers that start together; replaces both settings.
        seed: Seed of the study; replaces both settings.

    Raises:
        ConfigError: With every mistake in the file and the overrides.
    """
    problems: list[Problem] = []
    data = load_scenario(name).study
    if file is not None:
        given = read_mapping(Path(file), problems)
        for key in ("baselines", "storage"):
            given.pop(key, None)
        enqueue = given.get("enqueue") or []
        given["enqueue"] = enqueue[:1] if isinstance(enqueue, list) else enqueue
        given["budget"] = {**_mapping(given.get("budget")), "trials": 1}
        data = _merged(data, {**given, "replicates": 1})
    data["scenarios"] = [name]
    label, arguments = scenario_label(name), _mapping(data.get("scenario_args"))
    data["scenario_args"] = {label: arguments[label]} if label in arguments else {}
    apply_overrides(data, overrides, problems)
    if peers is not None:
        data = _merged(data, {"swarm": {"peers": peers}})
    if seed is not None:
        data["seed"] = seed
    data.setdefault("objectives", {"samples_per_s": "maximize"})
    return validate_sweep(data, None if file is None else str(file), problems)


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``below`` replaced by ``above``; budget, swarm and evaluation merge key by key."""
    merged = {**below, **above}
    for key in ("budget", "swarm", "evaluation"):
        if isinstance(below.get(key), Mapping) and isinstance(above.get(key), Mapping):
            merged[key] = {**below[key], **above[key]}
    return merged
