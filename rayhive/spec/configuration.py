"""Configurations and spaces, whose fields are the registered axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import create_model

from rayhive.spec.axes import AXES, DRAW_ORDER, Axis, Values
from rayhive.spec.axes.base import Distribution
from rayhive.spec.model import Model

M = TypeVar("M", bound=Model)


def _with_fields(fields: dict[str, Any]) -> Callable[[type[M]], type[M]]:
    """Return a decorator that adds fields to a model: name -> annotation and default."""

    def add(model: type[M]) -> type[M]:
        return create_model(
            model.__name__,
            __base__=model,
            __doc__=model.__doc__,
            __module__=model.__module__,
            **fields,
        )

    return add


@_with_fields(
    {
        axis.name: (axis.type | None, None) if axis.depends_on else (axis.type, axis.default)
        for axis in AXES
    }
)
class Configuration(Model):
    """One point of a space, and one row of the results table per scenario.

    It has one field per axis; see the files of :mod:`rayhive.spec.axes`. A field is None where its
    axis does not apply.
    """

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    @property
    def values(self) -> dict[str, Any]:
        """Name -> value of every axis, defaults filled in where an axis applies."""
        values = dict(self)
        for axis in DRAW_ORDER:
            if values[axis.name] is None and axis.applies(values):
                values[axis.name] = axis.default
        return values

    def round_size(self, target_batch_size: int) -> int:
        """Return the samples of a round, over the swarm, from those of a batch of the swarm."""
        return max(1, target_batch_size * (self.local_steps or 1) // (self.fragments or 1))

    def group_peers(self, peers: int) -> int:
        """Return the peers of a group in a swarm of so many; of an odd number, of most groups."""
        return min(self.group_size, peers) if isinstance(self.group_size, int) else peers

    def groups(self, peers: int) -> int:
        """Return the groups of a round in a swarm of so many; a peer left over joins the last."""
        return peers // self.group_peers(peers)

    def completed(self) -> Configuration:
        """Return the configuration with the defaults of the axes that apply."""
        return self.model_copy(update=self.values)

    @property
    def label(self) -> str:
        """Short stable name, unique among configurations that differ.

        The parts of axes that depend on another axis follow the part of that axis in parentheses,
        as in ``size_adaptive(65537) rank2(≥0.5) delay-state``.
        """
        values = self.values
        parts: dict[str, str] = {}
        details: dict[str, list[str]] = {}
        for axis in DRAW_ORDER:
            value = values[axis.name]
            text = "" if value is None else axis.label(value)
            if text and axis.depends_on:
                details.setdefault(axis.depends_on[0], []).append(text)
            elif text:
                parts[axis.name] = text
        return " ".join(
            f"{text}({', '.join(details[name])})" if name in details else text
            for name, text in parts.items()
        )


@_with_fields({axis.name: (Distribution, (axis.default,)) for axis in AXES})
class Space(Model):
    """Distributions of the axes that a study searches; a constant is an axis of one value."""

    if TYPE_CHECKING:

        def __init__(self, **distributions: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


def decide(choose: Callable[[Axis, Values], Any]) -> dict[str, Any]:
    """Choose a value for each axis that applies; the value of the other axes is None.

    Args:
        choose: Returns the value of an axis, given the values of the axes before it.
    """
    values: dict[str, Any] = {}
    for axis in DRAW_ORDER:
        values[axis.name] = choose(axis, values) if axis.applies(values) else None
    return values


def combinations(points: Callable[[Axis], Sequence[Any]]) -> Iterator[Configuration]:
    """Yield every configuration of the given values, each once.

    Args:
        points: Returns the values of an axis.
    """

    def extended(values: dict[str, Any], axes: Sequence[Axis]) -> Iterator[Configuration]:
        if not axes:
            yield Configuration(**values)
            return
        axis, *rest = axes
        for value in points(axis) if axis.applies(values) else (None,):
            yield from extended({**values, axis.name: value}, rest)

    return extended({}, DRAW_ORDER)
