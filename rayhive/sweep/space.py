"""Conditional search space of a study: its configurations, and how one is drawn.

An axis is asked only where it applies, and only if it has several values, so every draw is valid.
Draws with the same :func:`rayhive.compression.equivalence.configuration_key` are one configuration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from rayhive.compression.equivalence import configuration_key
from rayhive.compression.payload import averaged_sizes
from rayhive.spec import AXES, Axis, Configuration, Range, Space
from rayhive.spec.axes import Values
from rayhive.spec.configuration import combinations, decide
from rayhive.spec.distribution import choices

if TYPE_CHECKING:
    from optuna import Trial

#: Draws without a new configuration after which a space that cannot be listed is exhausted.
ENOUGH_DRAWS = 500
#: Largest number of points of a space that is listed.
LISTABLE = 2000

Shapes = Sequence[tuple[int, ...]]


class Chooser(Protocol):
    """Source of the values of axes with several values."""

    def choice(self, name: str, values: tuple[Any, ...]) -> Any:
        """Return one of several values."""

    def whole(self, name: str, low: int, high: int, log: bool) -> int:
        """Return a whole number, both ends included."""

    def real(self, name: str, low: float, high: float, log: bool) -> float:
        """Return a number, both ends included."""


class SearchSpace:
    """The configurations that a study may try.

    Args:
        space: Its axes.
        shapes: Shapes of the gradients. They determine in which part of a range values differ in
            their effect, and which configurations have the same effect.
    """

    def __init__(self, space: Space, shapes: Shapes) -> None:
        self.space = space
        self.shapes = tuple(tuple(shape) for shape in shapes)

    def key(self, configuration: Configuration) -> str:
        """Return a string that is equal for configurations with the same effect."""
        return configuration_key(self.shapes, configuration)

    def draw(self, chooser: Chooser) -> Configuration:
        """Return the configuration that ``chooser`` decides on."""

        def choose(axis: Axis, values: Values) -> Any:
            return _pick(chooser, axis, self._distribution(axis, values))

        return Configuration(**decide(choose))

    def _distribution(self, axis: Axis, values: Values) -> Range | tuple[Any, ...]:
        """Return the distribution of an axis, given the values of the axes before it."""
        distribution: Range | tuple[Any, ...] = getattr(self.space, axis.name)
        if not axis.drawn_after or not isinstance(distribution, Range):
            return distribution
        sizes = averaged_sizes(self.shapes, {name: values[name] for name in axis.drawn_after})
        return axis.narrowed(distribution, sizes)

    def parameters(self, configuration: Configuration) -> dict[str, Any]:
        """Return the values of the axes that lead to ``configuration``, as far as they can.

        An enqueued configuration may lie outside the space. A value that its axis does not allow
        is left out, and the sampler learns nothing about that axis.
        """
        follower = _Follower(configuration)
        self.draw(follower)
        return follower.found

    def follow(self, configuration: Configuration, trial: Trial) -> None:
        """Ask ``trial`` for every axis in :meth:`parameters`; it returns the queued values."""
        self.draw(_Follower(configuration, trial))

    def every(self) -> Iterator[Configuration] | None:
        """Yield every configuration once per spelling; None if they are too many to list."""
        points = {axis.name: choices(getattr(self.space, axis.name)) for axis in AXES}
        listed = {name: values for name, values in points.items() if values is not None}
        if len(listed) < len(points) or math.prod(map(len, listed.values())) > LISTABLE:
            return None
        return combinations(lambda axis: listed[axis.name])

    def unseen(self, seen: set[str], random: Random) -> Configuration | None:
        """Return a configuration whose key is not in ``seen``, or None.

        If the space can be listed the answer is exact. Otherwise it depends on several hundred
        draws.
        """
        everything = self.every()
        if everything is not None:
            rest = [item for item in everything if self.key(item) not in seen]
            return random.choice(rest) if rest else None
        chooser = RandomChooser(random)
        for _ in range(ENOUGH_DRAWS):
            configuration = self.draw(chooser)
            if self.key(configuration) not in seen:
                return configuration
        return None


class RandomChooser:
    """Chooser that draws values at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choice(self, name: str, values: tuple[Any, ...]) -> Any:
        """Return one of the values, each with the same probability."""
        return self._random.choice(values)

    def whole(self, name: str, low: int, high: int, log: bool) -> int:
        """Return a whole number, uniform in itself or in its logarithm."""
        if not log:
            return self._random.randint(low, high)
        # Every whole number represents the half-open interval around it.
        drawn = self._random.uniform(math.log(low - 0.5), math.log(high + 0.5))
        return min(high, max(low, round(math.exp(drawn))))

    def real(self, name: str, low: float, high: float, log: bool) -> float:
        """Return a number, uniform in itself or in its logarithm."""
        if not log:
            return self._random.uniform(low, high)
        drawn = math.exp(self._random.uniform(math.log(low), math.log(high)))
        return min(high, max(low, drawn))


class OptunaChooser:
    """Chooser that follows the suggestions of Optuna's sampler."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def choice(self, name: str, values: tuple[Any, ...]) -> Any:
        """Return the sampler's choice."""
        return self._trial.suggest_categorical(name, values)

    def whole(self, name: str, low: int, high: int, log: bool) -> int:
        """Return the sampler's whole number."""
        return self._trial.suggest_int(name, low, high, log=log)

    def real(self, name: str, low: float, high: float, log: bool) -> float:
        """Return the sampler's number."""
        return self._trial.suggest_float(name, low, high, log=log)


class _Follower:
    """Chooser of the values of a given configuration; it records those that their axes allow.

    Args:
        configuration: The configuration.
        trial: Trial that is asked for every recorded value, so that the sampler learns from it.
    """

    def __init__(self, configuration: Configuration, trial: Trial | None = None) -> None:
        self._wanted = configuration.model_dump()
        self._optuna = None if trial is None else OptunaChooser(trial)
        self.found: dict[str, Any] = {}

    def choice(self, name: str, values: tuple[Any, ...]) -> Any:
        wanted = self._wanted[name]
        if wanted not in values:
            return values[0]
        if self._optuna is not None:
            self._optuna.choice(name, values)
        self.found[name] = values[values.index(wanted)]
        return self.found[name]

    def whole(self, name: str, low: int, high: int, log: bool) -> int:
        if not self._holds(name, low, high):
            return low
        if self._optuna is not None:
            self._optuna.whole(name, low, high, log)
        return int(self.found[name])

    def real(self, name: str, low: float, high: float, log: bool) -> float:
        if not self._holds(name, low, high):
            return low
        if self._optuna is not None:
            self._optuna.real(name, low, high, log)
        return float(self.found[name])

    def _holds(self, name: str, low: float, high: float) -> bool:
        wanted = self._wanted[name]
        if wanted is None or not low <= wanted <= high:
            return False
        self.found[name] = wanted
        return True


def _pick(chooser: Chooser, axis: Axis, distribution: Range | tuple[Any, ...]) -> Any:
    """Ask for a value of an axis unless it has only one."""
    if not isinstance(distribution, Range):
        if len(distribution) == 1:
            return distribution[0]
        return chooser.choice(axis.name, tuple(distribution))
    low, high = distribution.low, distribution.high
    if axis.kind == "number":
        return low if low == high else chooser.real(axis.name, low, high, distribution.log)
    low, high = math.ceil(low), math.floor(high)
    return low if low == high else chooser.whole(axis.name, low, high, distribution.log)
