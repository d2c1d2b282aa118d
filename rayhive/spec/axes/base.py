"""Base of the axes of a study: one subclass, one file and one registration line each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.spec.distribution import Range

if TYPE_CHECKING:
    from rayhive.spec.swarm import SwarmConfig

Values = Mapping[str, Any]


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
        gradients: Whether it changes the averaging of gradients; ``swarm.use_local_updates``
            averages none, and allows only the default then.
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
    gradients: ClassVar[bool] = True
    payload_argument: ClassVar[str | None] = None
    column: ClassVar[Column]
    examples: ClassVar[tuple[Any, ...]]

    @property
    def field_default(self) -> Any:
        """Default of the field in a configuration: None where the axis may not apply."""
        return None if self.depends_on else self.default

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
        alone = self.gradients and not self.depends_on
        if swarm.use_local_updates and alone and value != self.default:
            allowed = "null" if self.default is None else self.default
            yield f"{allowed} with swarm.use_local_updates: gradients are not averaged"

    def narrowed(self, distribution: Range, sizes: Sequence[int]) -> Range | tuple[Any, ...]:
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
