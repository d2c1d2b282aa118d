"""Base of the axes of a study: one subclass, one file and one registration line each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.model import Model, exponent
from rayhive.spec.swarm import SwarmConfig

Values = Mapping[str, Any]


class Range(Model):
    """Numbers between two ends.

    Attributes:
        low: Least value, included.
        high: Greatest value, included.
        log: Sample uniformly in the logarithm.
    """

    low: float
    high: float
    log: bool = False


def _read(value: object) -> object:
    """Read a constant as a list of one value; leave lists and ranges alone."""
    if isinstance(value, Range):
        return value
    if isinstance(value, Mapping):
        return Range.model_validate(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(exponent, value))
    return (exponent(value),)


Distribution = Annotated[Range | tuple[Any, ...], BeforeValidator(_read)]


def ends(distribution: Distribution) -> tuple[Any, ...]:
    """Return both ends of a range, or every value of a list."""
    if isinstance(distribution, Range):
        return (distribution.low, distribution.high)
    return tuple(distribution)


def shown(distribution: Distribution) -> object:
    """Return a distribution as a study writes it."""
    if isinstance(distribution, Range):
        return distribution.model_dump()
    return distribution[0] if len(distribution) == 1 else list(distribution)


class Axis(ABC):
    """One setting of a configuration, which a study may search.

    The rest of rayhive derives from the attributes and methods of the registered axes: the fields
    of :class:`~rayhive.spec.configuration.Configuration` and
    :class:`~rayhive.spec.configuration.Space`, the checks of a study, the draws of the sampler,
    the arguments of the strategy, the name of a configuration and its columns.

    Attributes:
        name: Key of the axis in a study, and the name of its column.
        type: Type of its values.
        default: Value where a study leaves the axis out.
        kind: Allowed distributions: ``choice`` allows constants and lists of values; ``integer``
            and ``number`` also allow ranges.
        depends_on: Axes that :meth:`applies` reads. An axis that depends on others is None in the
            configurations to which it does not apply.
        drawn_after: Further axes that are drawn earlier, because they determine the tensor sizes
            of :meth:`narrowed`.
        excluded_by: Axes that :meth:`excludes` reads.
        payload_argument: Argument of :func:`rayhive.compression.payload.payload` that takes its
            value; None if the bytes of a round do not depend on it.
        column: Its column of the results; name, definition, unit and type suffice.
        examples: Valid values with different effects, at least two; the contract tests use them.
            For every axis that depends on this one, it applies to one of them.
    """

    name: ClassVar[str]
    type: ClassVar[Any]
    default: ClassVar[Any]
    kind: ClassVar[Literal["choice", "integer", "number"]]
    depends_on: ClassVar[tuple[str, ...]] = ()
    drawn_after: ClassVar[tuple[str, ...]] = ()
    excluded_by: ClassVar[tuple[str, ...]] = ()
    payload_argument: ClassVar[str | None] = None
    column: ClassVar[Column]
    examples: ClassVar[tuple[Any, ...]]

    def applies(self, values: Values) -> bool:
        """Return whether the axis has an effect.

        Args:
            values: Name -> value of at least the axes in ``depends_on``.
        """
        return True

    def needs(self) -> str:
        """Return the condition of :meth:`applies`, to follow "absent without" in an error text."""
        return " and ".join(self.depends_on)

    @abstractmethod
    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find problems of a single value.

        Args:
            key: Key of the value in the study, for the error text.
            value: Any value that YAML can hold.
        """

    def conflicts(self, value: Any, swarm: SwarmConfig) -> Iterator[str]:
        """Find settings of the swarm that exclude a value, and yield the text of each problem."""
        yield from ()

    def excludes(self, value: Any, values: Values) -> Iterator[str]:
        """Find values of other axes that exclude a value, and yield the text of each problem.

        Args:
            value: The value.
            values: Name -> value of the axes in ``excluded_by``.
        """
        yield from ()

    def choices(self, distribution: Distribution) -> Sequence[Any] | None:
        """Return every value of a distribution, or None if it is a range that cannot be listed.

        A range of whole numbers can, unless the tensors of the module narrow it.
        """
        if not isinstance(distribution, Range):
            return distribution
        if distribution.low >= distribution.high:
            return (distribution.low,)
        if self.kind != "integer" or self.drawn_after:
            return None
        return range(math.ceil(distribution.low), math.floor(distribution.high) + 1)

    def narrowed(self, distribution: Range, sizes: Sequence[int]) -> Distribution:
        """Return the part of a range in which values differ in their effect.

        Args:
            distribution: The range of the study.
            sizes: Elements of every tensor that a round averages.
        """
        return distribution

    @abstractmethod
    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Add the effect to the arguments of the strategy.

        Only called if the axis applies, and after the axes that it depends on. Averagers and
        codecs come from their registries, so that this package imports neither torch nor hivemind.

        Args:
            arguments: Keyword arguments of :class:`rayhive.HivemindStrategy`, changed in place.
            values: Name -> value of every axis.
        """

    @abstractmethod
    def label(self, value: Any) -> str:
        """Return the part of a configuration's name; empty if the name leaves the value out."""


def is_whole(value: object, low: float, high: float = math.inf) -> bool:
    """Return whether a value is a whole number from ``low`` to ``high``; 2.0 is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value == int(value) and low <= value <= high
