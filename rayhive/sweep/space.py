"""The conditional space: which configurations there are, and how one is drawn.

An axis is only asked where it means something: a threshold with a codec that has one, a least
compression ratio with a PowerSGD rank. A constant is never asked. So every draw is valid, and two
draws differ in name only where :func:`rayhive.compression.payload.configuration_key` says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from rayhive.compression.payload import configuration_key, threshold_range
from rayhive.registry import CODECS
from rayhive.spec import Configuration, Range, Space

if TYPE_CHECKING:
    from optuna import Trial

#: Draws without anything new after which a space that cannot be listed counts as exhausted.
ENOUGH_DRAWS = 500
#: Points up to which a space is listed.
LISTABLE = 2000

Shapes = Sequence[tuple[int, ...]]


class Chooser(Protocol):
    """What decides on each axis that has a choice."""

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
        shapes: Shapes of the gradients; they decide which thresholds change anything and which
            configurations are one and the same.
    """

    def __init__(self, space: Space, shapes: Shapes) -> None:
        self.space = space
        self.shapes = tuple(tuple(shape) for shape in shapes)

    def key(self, configuration: Configuration) -> str:
        """Return what tells configurations apart that differ in more than their spelling."""
        return configuration_key(self.shapes, configuration)

    def draw(self, chooser: Chooser) -> Configuration:
        """Return the configuration that ``chooser`` decides on."""
        space = self.space
        codec = _pick(chooser, "codec", space.codec)
        ratio, threshold = None, None
        rank = _pick(chooser, "powersgd_rank", space.powersgd_rank, whole=True)
        if rank is not None:
            ratio = float(_pick(chooser, "min_compression_ratio", space.min_compression_ratio))
        if CODECS.get(codec).uses_threshold:
            axis = self._threshold_axis(rank, ratio)
            threshold = int(_pick(chooser, "threshold", axis, whole=True))
        return Configuration(
            codec=codec,
            threshold=threshold,
            powersgd_rank=None if rank is None else int(rank),
            min_compression_ratio=ratio,
            delay=_pick(chooser, "delay", space.delay),
        )

    def _threshold_axis(self, rank: int | None, ratio: float | None) -> Any:
        """Narrow a range of thresholds to where they change anything at this rank.

        Under PowerSGD a threshold meets the factors, which are far smaller than the gradients:
        most of a range that suits the gradients would then do nothing.
        """
        axis = self.space.threshold
        if not isinstance(axis, Range):
            return axis
        least, most = threshold_range(self.shapes, rank, ratio)
        low, high = max(math.ceil(axis.low), least), min(math.floor(axis.high), most)
        if low > high:  # all or none are large anywhere in the range
            return (math.floor(axis.high) if axis.high < least else math.ceil(axis.low),)
        return Range(low=low, high=high, log=axis.log)

    def parameters(self, configuration: Configuration) -> dict[str, Any]:
        """Return the values of the axes that lead to ``configuration``, as far as they can.

        An enqueued configuration may lie outside the space; a value that its axis does not hold
        is left out, and the sampler learns nothing from that axis.
        """
        follower = _Follower(configuration)
        self.draw(follower)
        return follower.found

    def follow(self, configuration: Configuration, trial: Trial) -> None:
        """Ask ``trial`` for every axis in :meth:`parameters`; it answers with the queued value."""
        self.draw(_Follower(configuration, trial))

    def every(self) -> Iterator[Configuration] | None:
        """Yield every configuration once per spelling; None if they are too many to list."""
        axes = [getattr(self.space, name) for name in Space.model_fields]
        if any(isinstance(axis, Range) and axis.low < axis.high for axis in axes):
            return None
        if math.prod(len(_values(axis)) for axis in axes) > LISTABLE:
            return None
        return self._product()

    def _product(self) -> Iterator[Configuration]:
        space = self.space
        for codec in _values(space.codec):
            for rank in _values(space.powersgd_rank):
                for ratio in _values(space.min_compression_ratio) if rank is not None else [None]:
                    adaptive = CODECS.get(codec).uses_threshold
                    for threshold in _values(space.threshold) if adaptive else [None]:
                        for delay in _values(space.delay):
                            yield Configuration(
                                codec=codec,
                                threshold=threshold,
                                powersgd_rank=rank,
                                min_compression_ratio=ratio,
                                delay=delay,
                            )

    def unseen(self, seen: set[str], random: Random) -> Configuration | None:
        """Return a configuration whose key is not in ``seen``; None if there seems to be none.

        Where the space can be listed the answer is exact; else several hundred draws decide.
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
    """Decides at random."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choice(self, name: str, values: tuple[Any, ...]) -> Any:
        """Return any of the values."""
        return self._random.choice(values)

    def whole(self, name: str, low: int, high: int, log: bool) -> int:
        """Return a whole number, uniform in itself or in its logarithm."""
        if not log:
            return self._random.randint(low, high)
        # Every whole number stands for the half-open interval around it.
        drawn = self._random.uniform(math.log(low - 0.5), math.log(high + 0.5))
        return min(high, max(low, round(math.exp(drawn))))

    def real(self, name: str, low: float, high: float, log: bool) -> float:
        """Return a number, uniform in itself or in its logarithm."""
        if not log:
            return self._random.uniform(low, high)
        drawn = math.exp(self._random.uniform(math.log(low), math.log(high)))
        return min(high, max(low, drawn))


class OptunaChooser:
    """Decides as Optuna's sampler suggests."""

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
    """Decides for a given configuration and notes what it could decide.

    Args:
        configuration: Where to go.
        trial: Asked for every value that its axis holds, so that the sampler learns from it.
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


def _pick(chooser: Chooser, name: str, axis: Any, whole: bool = False) -> Any:
    """Ask for a value of ``axis`` unless it has only one."""
    if not isinstance(axis, Range):
        return axis[0] if len(axis) == 1 else chooser.choice(name, tuple(axis))
    if whole:
        low, high = math.ceil(axis.low), math.floor(axis.high)
        return low if low == high else chooser.whole(name, low, high, axis.log)
    if axis.low == axis.high:
        return axis.low
    return chooser.real(name, axis.low, axis.high, axis.log)


def _values(axis: Any) -> tuple[Any, ...]:
    return (axis.low,) if isinstance(axis, Range) else tuple(axis)
