"""Contract of the axes: every registered one, and planted ones that lack a part."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from rayhive.columns import Column, find_column
from rayhive.compression.payload import payload
from rayhive.errors import Problem
from rayhive.registry import Registry
from rayhive.spec import AXES, Axis, Configuration, Range, Space, SwarmConfig
from rayhive.spec.axes import DRAW_ORDER, REGISTERED, Values, draw_order
from rayhive.spec.axes.codec import Codec
from rayhive.spec.axes.delay import Delay
from rayhive.spec.axes.min_compression_ratio import MinCompressionRatio
from rayhive.spec.axes.powersgd_rank import PowerSGDRank
from rayhive.spec.configuration import combinations
from rayhive.spec.rules import check_configuration, check_space
from rayhive.sweep.space import SearchSpace

#: Shapes for which the two examples of every axis differ in effect.
SHAPES = ((64, 4000), (64, 100), (64,), (3, 4))
#: Values that no axis allows.
REFUSED: tuple[Any, ...] = ([], {}, float("nan"), "no such value", -1, True)


def contexts(axis: Axis) -> list[Configuration]:
    """Return configurations of the other axes' examples, the axis itself at its default.

    The axes that it depends on are combined with one other axis at a time, and with what that one
    depends on; all others keep their defaults.
    """
    found: dict[str, Configuration] = {}
    for varied in {needed(axis) | needed(other) for other in AXES}:

        def points(other: Axis, varied: frozenset[str] = varied) -> tuple[Any, ...]:
            if other.name == axis.name or other.name not in varied:
                return (None if other.depends_on else other.default,)
            return tuple(dict.fromkeys((other.default, *other.examples)))

        found |= {str(item): item for item in combinations(points)}
    return list(found.values())


def needed(axis: Axis) -> frozenset[str]:
    """Return the names of an axis and of those that it depends on or is drawn after."""
    by_name = {other.name: other for other in AXES}
    above = (needed(by_name[name]) for name in (*axis.depends_on, *axis.drawn_after))
    return frozenset({axis.name}).union(*above)


def described(value: Any) -> object:
    """Return something that compares equal for arguments with the same effect."""
    if isinstance(value, partial):
        return value.func, value.args, sorted(value.keywords.items())
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    return type(value), sorted((name, repr(item)) for name, item in vars(value).items())


def arguments(axis: Axis, values: Values) -> dict[str, object]:
    """Return the strategy's arguments, ``axis`` in place of the registered one of its name."""
    found: dict[str, Any] = {}
    for each in DRAW_ORDER:
        chosen = axis if each.name == axis.name else each
        if chosen.applies(values):
            chosen.apply(found, values)
    return {name: described(value) for name, value in found.items()}


def missing_parts(axis: Axis) -> Iterator[str]:
    """Find the parts of the contract that an axis does not keep."""
    one, other, *_ = axis.examples
    kinds = {"choice": "text", "integer": "count", "number": "float"}
    column = "flag" if axis.type is bool else kinds[axis.kind]
    if (axis.column.name, axis.column.type) != (axis.name, column):
        yield "column"
    if axis.payload_argument not in (None, *inspect.signature(payload).parameters):
        yield "payload_argument"
    if any(list(axis.check("key", value)) for value in (axis.default, *axis.examples)):
        yield "check refuses a valid value"
    for value in (value for value in REFUSED if axis.type is not bool or value is not True):
        found = list(axis.check("key", value))
        if [problem.key for problem in found] != ["key"] or not found[0].allowed:
            yield f"check of {value!r}"
    if axis.label(one) == axis.label(other):
        yield "label"
    applying = [item for item in contexts(axis) if axis.applies(item.values)]
    if bool(axis.depends_on) == (len(applying) == len(contexts(axis))):
        yield "applies"
    if axis.depends_on and not axis.needs():
        yield "needs"
    told_apart = 0
    for context in applying:
        values = [{**context.values, axis.name: value} for value in (one, other)]
        try:
            if arguments(axis, values[0]) == arguments(axis, values[1]):
                yield "apply"
        except KeyError:  # an axis that depends on this one has nothing to extend
            yield "apply"
        search = SearchSpace(Space(), SHAPES)
        told_apart += len({search.key(Configuration(**each)) for each in values}) > 1
    if not told_apart:
        yield "key"


def test_axes_are_registered_under_their_names() -> None:
    assert REGISTERED.names() == tuple(axis.name for axis in AXES)


every = pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)


@every
def test_an_axis_has_every_part(axis: Axis) -> None:
    assert sorted(set(missing_parts(axis))) == []


@every
def test_an_axis_is_a_field_of_configurations_and_spaces(axis: Axis) -> None:
    assert getattr(Configuration(), axis.name) == (None if axis.depends_on else axis.default)
    assert getattr(Space(), axis.name) == (axis.default,)
    for value in axis.examples:
        assert getattr(Space(**{axis.name: value}), axis.name) == (value,)


@every
def test_an_axis_is_a_column_that_tells_rows_apart(axis: Axis) -> None:
    column = find_column(axis.name)
    assert column is not None and column.tells_apart
    assert (column.group, column.about) == ("configuration", axis.column.about)


@every
def test_an_axis_that_does_not_apply_is_refused(axis: Axis) -> None:
    if not axis.depends_on:
        return
    given = {axis.name: axis.examples[0]}
    configuration, space = Configuration(**given), Space(**given)
    for key, found in (
        (axis.name, list(check_configuration(configuration))),
        (f"space.{axis.name}", list(check_space(space, SwarmConfig()))),
    ):
        assert [problem.key for problem in found] == [key]
        assert found[0].allowed == f"absent without {axis.needs()}"
    assert configuration.completed() == configuration


@every
def test_ranges_are_allowed_for_numbers_only(axis: Axis) -> None:
    low, high = (1, 2) if axis.kind == "choice" else sorted(axis.examples[:2])
    others = {o.name: o.default if o.name in axis.excluded_by else o.examples for o in AXES}
    space = Space(**{**others, axis.name: Range(low=low, high=high)})
    swarm = SwarmConfig(peers=8)
    refused = f"space.{axis.name}" in [item.key for item in check_space(space, swarm)]
    assert refused == (axis.kind == "choice")


class WithoutEffect(PowerSGDRank):
    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Do nothing."""


class WithoutName(Delay):
    def label(self, value: Any) -> str:
        return ""


class WithoutCheck(Codec):
    def check(self, key: str, value: Any) -> Iterator[Problem]:
        yield from ()


class WithoutCondition(MinCompressionRatio):
    def applies(self, values: Values) -> bool:
        return True


class WithoutColumn(Delay):
    column = Column("delayed", "Column of another name", type="text")


@pytest.mark.parametrize(
    ("axis", "part"),
    [
        (WithoutEffect(), "apply"),
        (WithoutName(), "label"),
        (WithoutCheck(), "check of 'no such value'"),
        (WithoutColumn(), "column"),
        (WithoutCondition(), "applies"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_axis_that_lacks_a_part_is_found(axis: Axis, part: str) -> None:
    assert part in set(missing_parts(axis))


def test_an_axis_without_a_method_cannot_be_made() -> None:
    class Unnamed(Axis):
        name = "unnamed"

    with pytest.raises(TypeError, match=r"apply.*check.*label"):
        Unnamed()  # type: ignore[abstract]


def test_an_axis_that_depends_on_an_unknown_one_cannot_be_registered() -> None:
    class Orphan(Delay):
        depends_on = ("no_such_axis",)

    with pytest.raises(ValueError, match="unknown axis: delay"):
        draw_order((Orphan(),))


def test_a_registry_in_order_keeps_the_order_of_registration() -> None:
    registry: Registry[int] = Registry("number", in_order=True)
    for name in ("two", "one", "three"):
        registry.register(name)(len(name))
    assert registry.names() == ("two", "one", "three")
