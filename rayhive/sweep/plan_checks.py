"""Checks of a scenario's plans against the baselines and the rounds of a study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rayhive.errors import Problem
from rayhive.faults.kind import kind_of
from rayhive.spec import Configuration, SweepConfig
from rayhive.spec.axes.base import ends, is_whole
from rayhive.spec.fault_plan import FaultPlan
from rayhive.spec.study import scenario_label


def check_study_of_plans(
    config: SweepConfig, scenario: str, plans: Iterable[FaultPlan | None]
) -> Iterator[Problem]:
    """Yield the mistakes of a study that a scenario's plans show."""
    known = [plan for plan in plans if plan is not None]
    yield from _check_baselines(config, scenario, known)
    yield from _check_rounds(config, scenario, known)


def _check_baselines(
    config: SweepConfig, scenario: str, plans: Sequence[FaultPlan]
) -> Iterator[Problem]:
    """Yield a problem if a scenario has faults that only peers of a swarm can suffer."""
    kinds = {fault.kind for plan in plans for fault in plan.faults}
    only = sorted(kind for kind in kinds if kind_of(kind).of_swarm)
    if config.baselines and only:
        allowed = (
            f"absent with scenario {scenario_label(scenario)}, whose faults {', '.join(only)} act "
            "on parts that only peers of a swarm have"
        )
        yield Problem("baselines", ", ".join(config.baselines), allowed)


def _check_rounds(
    config: SweepConfig, scenario: str, plans: Sequence[FaultPlan]
) -> Iterator[Problem]:
    """Yield rounds of another size in which a fault would not end before the last round."""
    target = config.swarm.target_batch_size
    for key, value, size in _round_sizes(config):
        rounds = config.budget.rounds(size)
        late = [
            fault
            for plan in plans
            for fault in plan.in_rounds_of(size, planned=target).faults
            if fault.at.round is not None
            and rounds is not None
            and kind_of(fault.kind).last_round(fault.at.round, fault.args) >= rounds
        ]
        if late and size != target:
            allowed = (
                f"absent with scenario {scenario_label(scenario)}: in rounds of {size} samples, "
                f"of which the budget has {rounds}, {late[0].kind} at {late[0].at} would not end "
                "before the last one"
            )
            yield Problem(key, value, allowed)


def _round_sizes(config: SweepConfig) -> Iterator[tuple[str, Any, int]]:
    """Yield the rounds of a study that may be larger than a batch: key, value, samples."""
    target = config.swarm.target_batch_size
    fragments = min((n for n in ends(config.space.fragments) if is_whole(n, 1)), default=1)
    for batches in ends(config.space.local_steps):
        if is_whole(batches, 1):
            one = Configuration(local_steps=batches, fragments=fragments)
            yield "space.local_steps", batches, one.round_size(target)
    for index, one in enumerate(config.enqueue):
        if is_whole(one.local_steps, 1) and (one.fragments is None or is_whole(one.fragments, 1)):
            yield f"enqueue.{index}.local_steps", one.local_steps, one.round_size(target)
    if "local-sgd" in config.baselines:
        batches = config.local_sgd.local_steps
        yield "local_sgd.local_steps", batches, target * batches
