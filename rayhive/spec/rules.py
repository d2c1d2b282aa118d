"""Rules between the fields of a study, hivemind's own included.

hivemind finds some violations when it starts and some in the first round. Of others it gives no
sign: the weights do not change. These rules find all of them before anything starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Any

from rayhive.columns import LOSS, METRIC, is_metric, objectives
from rayhive.errors import Problem, nearest, unknown
from rayhive.registry import BASELINES, NOTICE_SOURCES, SCENARIOS
from rayhive.spec.axes import AXES, Axis
from rayhive.spec.axes.base import Distribution, Range, ends, is_whole, shown
from rayhive.spec.configuration import Configuration, Space
from rayhive.spec.study import SCENARIO_NAME, SweepConfig, is_path, scenario_label
from rayhive.spec.swarm import SwarmConfig


def check_sweep(config: SweepConfig) -> list[Problem]:
    """Return every violation in a study whose structure is valid."""
    return [
        *_check_swarm(config),
        *check_space(config.space, config.swarm),
        *_check_enqueued(config),
        *_check_scenarios(config),
        *_check_baselines(config),
        *_check_budget(config),
        *_check_objectives(config),
        *_check_preemption(config),
    ]


def _wrong(config: SweepConfig, key: str, allowed: str) -> Problem:
    """Return the problem of the value that a study has under a dotted key."""
    return Problem(key, attrgetter(key)(config), allowed)


def _check_swarm(config: SweepConfig) -> Iterator[Problem]:
    """Find problems between the settings of the swarm."""
    swarm = config.swarm
    if swarm.batch_size is not None:
        yield from check_target_batch_size(swarm, swarm.batch_size, "`batch_size`")
    if swarm.matchmaking_time >= swarm.averaging_timeout:
        allowed = f"less than averaging_timeout ({swarm.averaging_timeout} s)"
        yield _wrong(config, "swarm.matchmaking_time", allowed)
    if swarm.node_classes is not None:
        count = sum(node_class.count for node_class in swarm.node_classes.values())
        if count != swarm.peers:
            allowed = f"the sum of the counts of swarm.node_classes, which is {count}"
            yield _wrong(config, "swarm.peers", allowed)
        if swarm.gpus_per_peer:
            allowed = "absent with swarm.node_classes: give `gpus` in each class"
            yield _wrong(config, "swarm.gpus_per_peer", allowed)


def _check_preemption(config: SweepConfig) -> Iterator[Problem]:
    """Find names that are no notice sources."""
    sources = config.preemption.sources
    for name in () if sources == "auto" else sources:
        if name not in NOTICE_SOURCES:
            yield unknown("preemption.sources", name, NOTICE_SOURCES.names())


def check_target_batch_size(swarm: SwarmConfig, batch_size: int, source: str) -> Iterator[Problem]:
    """Find a round that has fewer samples than one micro-batch of a peer.

    Args:
        swarm: The swarm.
        batch_size: Samples of a micro-batch.
        source: Description of where ``batch_size`` is given, for the error text.
    """
    if swarm.target_batch_size < batch_size:
        allowed = f"must be at least {source} ({batch_size})"
        yield Problem("swarm.target_batch_size", swarm.target_batch_size, allowed)


def check_space(space: Space, swarm: SwarmConfig) -> Iterator[Problem]:
    """Find problems of the axes of a study.

    Args:
        space: The axes.
        swarm: The swarm that would train with their values.
    """
    for axis in AXES:
        key, distribution = f"space.{axis.name}", getattr(space, axis.name)
        yield from _check_distribution(axis, key, distribution)
        if axis.name in space.model_fields_set and not _may_apply(axis, space):
            yield Problem(key, shown(distribution), f"absent without {axis.needs()}")
        yield from _check_conflicts(axis, key, distribution, swarm)
        yield from _check_excluded(axis, key, distribution, lambda name: ends(getattr(space, name)))


def check_configuration(
    configuration: Configuration, swarm: SwarmConfig | None = None
) -> Iterator[Problem]:
    """Find problems of one configuration.

    Args:
        configuration: The configuration.
        swarm: The swarm that would train with it, for the rules between the two.
    """
    values = dict(configuration)
    for axis in AXES:
        value = values[axis.name]
        if value is None and axis.depends_on:
            continue
        if not axis.applies(values):
            yield Problem(axis.name, value, f"absent without {axis.needs()}")
        yield from axis.check(axis.name, value)
        yield from _check_excluded(axis, axis.name, (value,), lambda name: (values[name],))
        if swarm is not None:
            yield from _check_conflicts(axis, axis.name, (value,), swarm)


def _check_listed_once(key: str, values: tuple[Any, ...]) -> Iterator[Problem]:
    """Find an empty list, and values that it repeats."""
    if not values:
        yield Problem(key, [], "at least one value")
    for index, value in enumerate(values):
        if value in values[:index]:
            yield Problem(key, value, "listed once")


def _check_enqueued(config: SweepConfig) -> Iterator[Problem]:
    for index, configuration in enumerate(config.enqueue):
        for problem in check_configuration(configuration, config.swarm):
            yield replace(problem, key=f"enqueue.{index}.{problem.key}")


def _check_scenarios(config: SweepConfig) -> Iterator[Problem]:
    """Find unknown names; the scenarios themselves are checked where they are planned."""
    for scenario in config.scenarios:
        label = scenario_label(scenario)
        if is_path(scenario):
            if label in SCENARIOS:
                yield Problem("scenarios", scenario, "a file with a name that no scenario has")
            elif not SCENARIO_NAME.fullmatch(label):
                yield Problem("scenarios", scenario, "a file whose name is letters, digits and -")
        elif scenario not in SCENARIOS:
            yield unknown("scenarios", scenario, SCENARIOS.names())
    labels = tuple(scenario_label(scenario) for scenario in config.scenarios)
    yield from _check_listed_once("scenarios", labels)
    for name, values in config.scenario_args.items():
        if name not in labels:
            yield unknown(f"scenario_args.{name}", values, labels)


def _check_baselines(config: SweepConfig) -> Iterator[Problem]:
    """Find unknown names, and names that are listed twice."""
    for index, name in enumerate(config.baselines):
        if name not in BASELINES:
            yield unknown("baselines", name, BASELINES.names())
        elif name in config.baselines[:index]:
            yield Problem("baselines", name, "listed once")


def _check_budget(config: SweepConfig) -> Iterator[Problem]:
    samples, target = config.budget.samples_per_replicate, config.swarm.target_batch_size
    if samples is not None and samples < target:
        allowed = f"at most budget.samples_per_replicate ({samples}), which is at least one round"
        yield _wrong(config, "swarm.target_batch_size", allowed)
    elif samples is not None:
        allowed = f"such that a round of local_steps x swarm.target_batch_size ({target}) has "
        allowed += f"at most budget.samples_per_replicate ({samples})"
        given = {"space.local_steps": ends(config.space.local_steps)}
        for number, one in enumerate(config.enqueue):
            given[f"enqueue.{number}.local_steps"] = (one.local_steps,)
        for key, values in given.items():
            most = max(values, key=_whole_or_none, default=None)
            if target * _whole_or_none(most) > samples:
                yield Problem(key, most, allowed)
    if config.budget.trials < len(config.enqueue):
        allowed = f"at least the {len(config.enqueue)} configurations of enqueue"
        yield _wrong(config, "budget.trials", allowed)


def _whole_or_none(batches: Any) -> int:
    """Return a number of local steps; 0 for none, and for a value that its axis refuses."""
    return int(batches) if is_whole(batches, 1) else 0


def _check_objectives(config: SweepConfig) -> Iterator[Problem]:
    known = objectives()
    for name, direction in config.objectives.items():
        key = f"objectives.{name}"
        if is_metric(name):
            continue  # checked with the workload
        if name not in known:
            allowed = f"one of {', '.join(known)}, or {METRIC}NAME for a metric of the workload"
            near = "final_loss" if name == LOSS else nearest(name, tuple(known))
            yield Problem(key, name, allowed, near)
        elif direction != known[name]:
            yield Problem(key, direction, known[name])
        elif name.startswith("retention") and set(config.scenarios) == {"none"}:
            yield Problem(key, name, "absent without a scenario that plans faults")
        elif name.startswith("retention") and not (config.twins or "none" in config.scenarios):
            yield Problem(key, name, "absent without twins to compare with (twins: true)")
    if "samples_to_target" in config.objectives and config.budget.samples_per_replicate is None:
        yield _wrong(
            config,
            "budget.samples_per_replicate",
            "given with the objective samples_to_target: a replicate that misses the target is "
            "charged a multiple of it",
        )
    last = [name for name in config.objectives if is_metric(name) or name == "final_loss"]
    if config.budget.stop_at_target and last:
        yield _wrong(
            config,
            "budget.stop_at_target",
            f"false when {last[0]} is an objective: values after different sample counts do not "
            "compare",
        )


def _check_distribution(axis: Axis, key: str, distribution: Distribution) -> Iterator[Problem]:
    if not isinstance(distribution, Range):
        yield from _check_listed_once(key, distribution)
    elif axis.kind == "choice":
        yield Problem(key, shown(distribution), "a name or a list of names")
        return
    elif distribution.low > distribution.high or (distribution.log and distribution.low <= 0):
        yield Problem(key, shown(distribution), "low ≤ high, and low > 0 where log is true")
    for value in ends(distribution):
        yield from axis.check(key, value)


def _may_apply(axis: Axis, space: Space) -> bool:
    """Return whether an axis applies to any values of the axes that it depends on."""
    points = [ends(getattr(space, name)) for name in axis.depends_on]
    return any(
        axis.applies(dict(zip(axis.depends_on, values, strict=True))) for values in product(*points)
    )


def _check_excluded(
    axis: Axis, key: str, distribution: Distribution, points: Callable[[str], Sequence[Any]]
) -> Iterator[Problem]:
    """Find values that values of other axes exclude; one problem for each reason.

    Args:
        axis: The axis.
        key: Its key.
        distribution: Its values.
        points: Returns the values of another axis.
    """
    others = list(product(*(points(name) for name in axis.excluded_by)))
    found = {
        allowed: value
        for value in ends(distribution)
        for values in others
        for allowed in axis.excludes(value, dict(zip(axis.excluded_by, values, strict=True)))
    }
    for allowed, value in found.items():
        yield Problem(key, value, allowed)


def _check_conflicts(
    axis: Axis, key: str, distribution: Distribution, swarm: SwarmConfig
) -> Iterator[Problem]:
    """Find values that the swarm excludes; one problem for each reason."""
    reasons: dict[str, list[Any]] = {}
    for value in ends(distribution):
        for allowed in axis.conflicts(value, swarm):
            reasons.setdefault(allowed, []).append(value)
    for allowed, values in reasons.items():
        yield Problem(key, shown(distribution) if len(values) > 1 else values[0], allowed)
