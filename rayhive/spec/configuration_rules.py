"""Rules of configurations and spaces, derived from the registered axes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from rayhive.errors import Problem
from rayhive.spec.axes import AXES, Axis
from rayhive.spec.configuration import Configuration, Space
from rayhive.spec.distribution import Range, ends, shown
from rayhive.spec.swarm import SwarmConfig


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
        if swarm is not None:
            yield from _check_conflicts(axis, axis.name, (value,), swarm)


def check_listed_once(key: str, values: tuple[Any, ...]) -> Iterator[Problem]:
    """Find an empty list, and values that it repeats."""
    if not values:
        yield Problem(key, [], "at least one value")
    for index, value in enumerate(values):
        if value in values[:index]:
            yield Problem(key, value, "listed once")


def _check_distribution(
    axis: Axis, key: str, distribution: Range | tuple[Any, ...]
) -> Iterator[Problem]:
    if not isinstance(distribution, Range):
        yield from check_listed_once(key, distribution)
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


def _check_conflicts(
    axis: Axis, key: str, distribution: Range | tuple[Any, ...], swarm: SwarmConfig
) -> Iterator[Problem]:
    """Find values that the swarm excludes; one problem for each reason."""
    reasons: dict[str, list[Any]] = {}
    for value in ends(distribution):
        for allowed in axis.conflicts(value, swarm):
            reasons.setdefault(allowed, []).append(value)
    for allowed, values in reasons.items():
        yield Problem(key, shown(distribution) if len(values) > 1 else values[0], allowed)
