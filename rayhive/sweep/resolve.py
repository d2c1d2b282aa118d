"""Resolution of a study: from a file, a mapping or a model to a :class:`ResolvedStudy`.

A resolved study holds every default, scenario, fault plan and demand, derived once. The dry run,
the pre-flight check, the driver and the replicates read it and derive nothing themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from rayhive.columns import is_metric, metric_names
from rayhive.errors import ConfigError, Problem, described, unknown
from rayhive.faults.kind import needs_of
from rayhive.faults.library import load_scenario, plan_of
from rayhive.metrics.rows import NO_FAULTS
from rayhive.registry import SCENARIOS
from rayhive.spec import SwarmConfig, SweepConfig, validate_sweep
from rayhive.spec.fault_plan import FaultPlan
from rayhive.spec.rules import check_target_batch_size
from rayhive.spec.study import is_path, scenario_label
from rayhive.spec.yaml_data import Overrides, apply_overrides, read_mapping
from rayhive.sweep.plan_checks import check_study_of_plans
from rayhive.sweep.pruning import check_pruner
from rayhive.sweep.space import SearchSpace, check_sampler, check_tensors

if TYPE_CHECKING:
    from rayhive.workloads.base import Workload

#: Objectives that only a target determines.
TARGET_OBJECTIVES = ("time_to_target_s", "samples_to_target")
#: A study as a user gives it: the path of a YAML file, the content of one, or the model.
StudyLike: TypeAlias = str | Path | Mapping[str, Any] | SweepConfig
#: Capabilities that a testbed provides: shaped links, and nodes that can be ended or drained.
_OF_A_TESTBED = frozenset({"link", "node", "nodes", "drain"})


def replicate_seed(seed: int, replicate: int) -> int:
    """Return the seed of a replicate number: the same for every configuration of a study."""
    digest = hashlib.blake2b(f"{seed}/{replicate}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class WorkloadFacts:
    """Properties of a workload that a sweep needs.

    Attributes:
        shapes: Shapes of the parameters, from which payload is predicted.
        batch_size: Samples in one micro-batch of one peer.
        data: Whether the data is ``real`` or ``generated``.
        data_files: Files and folders of data that the workload names.
        extras: Shapes of the floating-point tensors that peers average with the parameters.
    """

    shapes: tuple[tuple[int, ...], ...]
    batch_size: int
    data: str
    data_files: tuple[Path, ...] = ()
    extras: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ResolvedScenario:
    """A scenario of a study with the fault plans of its replicates.

    Attributes:
        name: Name in result rows and in the folders of replicates.
        plans: Fault plan of each replicate number; None if no fault is planned.
    """

    name: str
    plans: tuple[FaultPlan | None, ...]


@dataclass(frozen=True)
class Demands:
    """Requirements that a swarm and its faults place on the nodes.

    Attributes:
        swarm: The swarm.
        needs: Kind of fault -> capabilities of :data:`rayhive.faults.target.CAPABILITIES` that a
            node must have for it.
        optional: The same for kinds that are left out where a node lacks one (``available_only``).
        joining: Most peers that join after the start.
    """

    swarm: SwarmConfig
    needs: Mapping[str, frozenset[str]]
    joining: int = 0
    optional: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def testbed(self) -> bool:
        """Whether nodes with shaped links or CPU shares, or nodes that can be ended, are needed."""
        classes = (self.swarm.node_classes or {}).values()
        wanted = frozenset().union(*self.needs.values(), *self.optional.values())
        return any(item.shaped for item in classes) or bool(wanted & _OF_A_TESTBED)


def most_joining(plans: Iterable[FaultPlan | None]) -> int:
    """Return the largest number of peers that any of the plans adds to a swarm."""
    return max((len(plan.joins) for plan in plans if plan is not None), default=0)


@dataclass(frozen=True)
class ResolvedStudy:
    """A study that is ready to run.

    Attributes:
        config: The study with defaults filled in, enqueued configurations complete and grids of
            scenarios replaced by their members. A run folder keeps it.
        workload: Properties of the workload.
        scenarios: The scenarios in the order of the study, the twin included.
        demands: Requirements on the nodes.
        twin_added: Whether the scenario ``none`` was added as the twin of the faulted ones.
    """

    config: SweepConfig
    workload: WorkloadFacts
    scenarios: tuple[ResolvedScenario, ...]
    demands: Demands
    twin_added: bool = False

    @cached_property
    def space(self) -> SearchSpace:
        """The configurations that the study may try."""
        return SearchSpace(self.config.space, self.workload.shapes)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each replicate number."""
        return tuple(replicate_seed(self.config.seed, n) for n in range(self.config.replicates))

    @property
    def replicates_per_trial(self) -> int:
        """Replicates of one trial, over all scenarios."""
        return len(self.scenarios) * self.config.replicates


def resolve(
    study: StudyLike,
    overrides: Overrides = (),
    *,
    source: str | None = None,
    workload: WorkloadFacts | None = None,
) -> ResolvedStudy:
    """Read, check and resolve a study.

    Args:
        study: The study.
        overrides: Values that replace single fields.
        source: Origin of the study for error messages; by default its path, if it has one.
        workload: Properties of the workload, if they are known; by default it is loaded for them.

    Raises:
        ConfigError: With every mistake in the study and the overrides.
    """
    problems: list[Problem] = []
    if isinstance(study, (str, Path)):
        source = str(study) if source is None else source
        data = read_mapping(Path(study), problems)
    elif isinstance(study, SweepConfig):
        data = {**yaml.safe_load(study.to_yaml()), "storage": study.storage}  # with its password
    else:
        data = deepcopy(dict(study))
    apply_overrides(data, overrides, problems)
    check = _Check(workload)
    checks = [check_sampler, check_pruner, check.workload, check.scenarios]
    config = validate_sweep(data, source, problems, checks)
    if check.facts is None or check.expanded is None:
        raise RuntimeError("a study was accepted without a workload")
    scenarios = check.expanded.scenarios
    if config.twins:
        scenarios = with_twin(scenarios)
    resolved = tuple(
        ResolvedScenario(scenario_label(n), check.plans.get(n, (None,) * config.replicates))
        for n in scenarios
    )
    enqueue = tuple(configuration.completed() for configuration in config.enqueue)
    return ResolvedStudy(
        config=check.expanded.model_copy(update={"enqueue": enqueue, "scenarios": scenarios}),
        workload=check.facts,
        scenarios=resolved,
        demands=Demands(
            swarm=config.swarm,
            needs=fault_needs(check.expanded, scenarios, optional=False),
            optional=fault_needs(check.expanded, scenarios, optional=True),
            joining=most_joining(plan for scenario in resolved for plan in scenario.plans),
        ),
        twin_added=NO_FAULTS not in config.scenarios and NO_FAULTS in scenarios,
    )


def expanded(config: SweepConfig) -> SweepConfig:
    """Return a study in which each grid of scenarios is replaced by its members.

    Arguments of a grid apply to each member. If they include the parameter of the grid itself, the
    grid is one scenario with that value.
    """
    names: list[str] = []
    args = dict(config.scenario_args)
    for name in config.scenarios:
        scenario = load_scenario(name) if not is_path(name) and name in SCENARIOS else None
        given = args.get(name, {})
        if scenario is None or not scenario.members or set(scenario.file.grid) & set(given):
            names.append(name)
            continue
        names.extend(scenario.members)
        if args.pop(name, None):
            args |= {member: {**given, **args.get(member, {})} for member in scenario.members}
    update = {"scenarios": tuple(dict.fromkeys(names)), "scenario_args": args}
    return config.model_copy(update=update)


def with_twin(scenarios: Sequence[str]) -> tuple[str, ...]:
    """Return scenarios with ``none`` in front, unless they include it.

    A faulted replicate is compared with its twin: the replicate of the same configuration and seed
    without faults. Retention and the convergence penalty need it.
    """
    return tuple(scenarios) if NO_FAULTS in scenarios else (NO_FAULTS, *scenarios)


def plan_replicate(
    config: SweepConfig,
    scenario: str,
    replicate: int,
    warnings: list[str] | None = None,
    refused: Collection[str] = (),
) -> FaultPlan:
    """Return the fault plan of one replicate of a study.

    Args:
        config: The study.
        scenario: One of its scenarios, by name or path.
        replicate: Number of the replicate; the plan of its twin has the same seed.
        warnings: Receives remarks on the files of the scenario.
        refused: Kinds of faults that the target of the run does not allow. Scenarios with
            ``available_only`` leave them out.

    Raises:
        ConfigError: With every mistake in the scenario or in its use here.
    """
    return plan_of(
        scenario,
        seed=replicate_seed(config.seed, replicate),
        peers=config.swarm.peers,
        swarm=config.swarm,
        budget=config.budget,
        args=config.scenario_args.get(scenario_label(scenario)),
        allows=lambda kind: kind not in refused,
        warnings=warnings,
    )


def planned_on(study: ResolvedStudy, refused: Iterable[Problem]) -> ResolvedStudy:
    """Return a study without the optional kinds of faults that its target refuses.

    Args:
        study: The study.
        refused: A problem for each of the optional kinds that the target does not allow.

    Raises:
        ConfigError: The scenarios cannot be planned without these kinds.
    """
    kinds = {str(problem.value) for problem in refused}
    if not kinds:
        return study
    numbers = range(study.config.replicates)
    optional = {kind: n for kind, n in study.demands.optional.items() if kind not in kinds}
    scenarios = tuple(
        ResolvedScenario(
            scenario_label(name), tuple(_faulted(study.config, name, n, kinds) for n in numbers)
        )
        for name in study.config.scenarios
    )
    return replace(study, scenarios=scenarios, demands=replace(study.demands, optional=optional))


def _faulted(
    config: SweepConfig, scenario: str, replicate: int, refused: Collection[str] = ()
) -> FaultPlan | None:
    """Return the fault plan of a replicate, None if it has no faults."""
    plan = plan_replicate(config, scenario, replicate, refused=refused)
    return plan if plan.faults else None


def fault_needs(
    config: SweepConfig, scenarios: Iterable[str], optional: bool
) -> dict[str, frozenset[str]]:
    """Return the capabilities that each kind of fault of some scenarios needs.

    Args:
        config: The study.
        scenarios: Some of its scenarios, by name or path.
        optional: Whether the kinds are returned that a plan leaves out where the target lacks a
            capability; otherwise those that it does not.
    """
    args = config.scenario_args
    return needs_of(
        fault
        for name in scenarios
        for fault in load_scenario(name).may_plan(args.get(scenario_label(name)), optional)
    )


@dataclass
class _Check:
    """Checks of a study that need its workload and its scenarios.

    Attributes:
        facts: Properties of the workload, once it has been found valid.
        expanded: The study with its grids of scenarios expanded.
        plans: Scenario, by name or path -> fault plan of each replicate.
    """

    facts: WorkloadFacts | None
    expanded: SweepConfig | None = field(default=None, init=False)
    plans: dict[str, tuple[FaultPlan | None, ...]] = field(default_factory=dict, init=False)

    def workload(self, config: SweepConfig) -> Iterator[Problem]:
        """Yield the mistakes in the workload, and in the swarm's batch size and number of peers."""
        from rayhive.averaging.gradient_extras import averageable
        from rayhive.workloads.loading import evaluation_problems, workload_of

        if self.facts is not None:
            return
        given = config.workload
        try:
            workload = workload_of(given)
            least, source = workload.default_batch_size, "the workload's default batch size"
            if config.swarm.batch_size is None:
                yield from check_target_batch_size(config.swarm, least, source)
            size = workload.train_size()
            workload.check()
            yield from evaluation_problems(given, workload)
            yield from _check_objectives(config, workload)
            self.facts = WorkloadFacts(
                shapes=tuple(tuple(shape) for shape in workload.parameter_shapes()),
                batch_size=config.swarm.batch_size or least,
                data=workload.data,
                data_files=tuple(workload.data_files()),
                extras=tuple(
                    tuple(tensor.shape)
                    for tensor in workload.extra_tensors(workload.module(seed=0))
                    if averageable(tensor)
                ),
            )
        except ConfigError as error:
            yield from error.problems
            return
        except Exception as error:  # raised by methods of the user's workload
            key = "workload.name" if given.import_path is None else "workload.import"
            yield Problem(key, given.label, f"a workload that works; it raised {described(error)}")
            return
        yield from check_tensors(config, len(self.facts.shapes))
        if size is not None and config.swarm.peers > size:
            allowed = f"at most the {size} samples that the workload trains on"
            yield Problem("swarm.peers", config.swarm.peers, allowed)

    def scenarios(self, config: SweepConfig) -> Iterator[Problem]:
        """Plan the faults of every replicate, and yield the mistakes that this shows."""
        self.expanded = config = expanded(config)
        for name in config.scenarios:
            if not is_path(name) and name not in SCENARIOS:
                continue  # reported by the rules of the study
            found: dict[str, Problem] = {}
            plans: list[FaultPlan | None] = []
            for number in range(config.replicates):
                try:
                    plans.append(_faulted(config, name, number))
                except ConfigError as error:
                    found.update((str(problem), problem) for problem in error.problems)
            self.plans[name] = tuple(plans)
            for problem in found.values():
                yield replace(problem, key=f"scenarios.{scenario_label(name)}: {problem.key}")
            yield from check_study_of_plans(config, name, plans)


def _check_objectives(config: SweepConfig, workload: Workload) -> Iterator[Problem]:
    """Yield objectives of metrics that the workload lacks, or that need a target it lacks."""
    logged = [name for name in config.objectives if is_metric(name)]
    known = list(metric_names(workload.metrics()).values()) if logged else []
    wrong = (name for name in logged if name not in known)
    yield from (unknown(f"objectives.{name}", name, known) for name in wrong)
    needed = [name for name in TARGET_OBJECTIVES if name in config.objectives]
    if workload.target is not None or not (needed or config.budget.stop_at_target):
        return
    why = f"objective {', '.join(needed)}" if needed else "key budget.stop_at_target"
    names = ", ".join(sorted(workload.metrics()))
    allowed = f"given with the {why}: {{metric, value, mode: min or max}}; metrics are {names}"
    yield Problem("workload.target", None, allowed)
