"""Scenarios as a dimension of a study: their twins, their plans, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from rayhive.cluster.node import capabilities
from rayhive.errors import ConfigError, Problem
from rayhive.faults.library import label, load_scenario, plan_of
from rayhive.faults.queries import needs_of
from rayhive.metrics.rows import NO_FAULTS
from rayhive.registry import SCENARIOS
from rayhive.spec import SwarmConfig, SweepConfig, is_path
from rayhive.spec.fault_plan import FaultPlan
from rayhive.sweep.replicate_runner import replicate_seed


def with_twin(scenarios: Sequence[str]) -> tuple[str, ...]:
    """Return scenarios with ``none`` before them, if it is not among them.

    A faulted replicate is compared with the replicate of the same configuration and seed in which
    nothing breaks; without it there would be no retention and no penalty.
    """
    return tuple(scenarios) if NO_FAULTS in scenarios else (NO_FAULTS, *scenarios)


def expanded(config: SweepConfig) -> SweepConfig:
    """Return a study in which each grid of scenarios is replaced by its members.

    Parameters that are given for a grid are given to each member. A grid whose own parameter is
    given is one scenario, that with this value.
    """
    names: list[str] = []
    args = dict(config.scenario_args)
    for name in config.scenarios:
        by_name = not is_path(name) and name in SCENARIOS
        scenario = load_scenario(name) if by_name else None
        given = args.get(name, {})
        if scenario is None or not scenario.members or set(scenario.file.grid) & set(given):
            names.append(name)
            continue
        names.extend(scenario.members)
        if args.pop(name, None):
            args |= {member: {**given, **args.get(member, {})} for member in scenario.members}
    update = {"scenarios": tuple(dict.fromkeys(names)), "scenario_args": args}
    return config.model_copy(update=update)


def replicate_plan(config: SweepConfig, scenario: str, seed: int) -> FaultPlan | None:
    """Return what breaks in a replicate; None if nothing does.

    Args:
        config: The study.
        scenario: One of its scenarios, as it names it.
        seed: Seed of the replicate: its twin has the same.

    Raises:
        ConfigError: With everything that is wrong with the scenario, or with its use here.
    """
    plan = plan_of(
        scenario,
        seed=seed,
        peers=config.swarm.peers,
        swarm=config.swarm,
        budget=config.budget,
        args=config.scenario_args.get(label(scenario)),
        allows=allows,
    )
    return plan if plan.faults else None


def check_scenarios(config: SweepConfig) -> Iterator[Problem]:
    """Plan every replicate of a study, and find what is wrong with that."""
    config = expanded(config)
    for name in config.scenarios:
        if not is_path(name) and name not in SCENARIOS:
            continue  # that was told
        told: set[str] = set()
        for number in range(config.replicates):
            try:
                replicate_plan(config, name, replicate_seed(config.seed, number))
            except ConfigError as error:
                for problem in error.problems:
                    if str(problem) not in told:
                        told.add(str(problem))
                        yield Problem(
                            f"scenarios.{label(name)}: {problem.key}",
                            problem.value,
                            problem.allowed,
                            problem.nearest,
                        )


def needs_of_study(config: SweepConfig) -> dict[str, frozenset[str]]:
    """Return what each kind of fault that the scenarios of a study may plan needs."""
    return needs_of(fault for name in config.scenarios for fault in load_scenario(name).may_plan())


def host_of(
    needs: Mapping[str, Collection[str]],
    swarm: SwarmConfig,
    address: str | None,
    later: Callable[[], int],
) -> AbstractContextManager[str | None]:
    """Return where a swarm runs: a testbed, where it needs one and no cluster is named.

    Args:
        needs: What the kinds of faults that may hit it need: some want links that are shaped, or
            nodes that can be ended. So do node classes with a link or a share of the processor.
        swarm: The swarm.
        address: The cluster that the user named, if any.
        later: Returns how many peers may join those that start together.
    """
    wanted = {need for each in needs.values() for need in each}
    shaped = any(item.shaped for item in (swarm.node_classes or {}).values())
    if not shaped and not wanted & {"link", "node", "nodes", "drain"}:
        return nullcontext(address)
    from rayhive.cluster.testbed.context import hosted

    return hosted(swarm, address, later())


def later(config: SweepConfig) -> int:
    """Return how many peers may join those of a study that start together."""
    plans = [
        replicate_plan(config, name, replicate_seed(config.seed, number))
        for name in config.scenarios
        for number in range(config.replicates)
    ]
    return max((len(plan.joins) for plan in plans if plan is not None), default=0)


def allows(kind: str) -> bool:
    """Return whether this machine allows a kind of fault."""
    return not capabilities.missing(needs_of([(kind, {})]), capabilities.here())
