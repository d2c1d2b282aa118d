"""Conditional search space of a study: its configurations, and how one is drawn.

An axis is asked only where it applies, and only if it has several values, so every draw is valid.
Draws with the same :meth:`SearchSpace.key` are one configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

from rayhive.compression.codecs.base import made
from rayhive.compression.codecs.size_adaptive import SizeAdaptive
from rayhive.compression.codecs.topk import Topk
from rayhive.compression.payload import averaged_sizes, configuration_payload
from rayhive.errors import Problem
from rayhive.spec import AXES, Axis, Configuration, Range, Space, SweepConfig
from rayhive.spec.axes.base import Distribution, Values, ends, is_whole
from rayhive.spec.configuration import combinations, decide

if TYPE_CHECKING:
    from optuna import Trial

#: Draws without a new configuration after which a space that cannot be listed is exhausted.
ENOUGH_DRAWS = 500
#: Largest number of points of a space that is listed.
LISTABLE = 2000
#: Axes whose effect depends on shapes; a key has the values of all other axes.
_OF_SHAPES = ("codec", "threshold", "top_k", "powersgd_rank", "min_compression_ratio")

Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Span:
    """Numbers from which a value is chosen: whole ones if the ends are integers.

    Attributes:
        low: Least number, included.
        high: Greatest number, included.
        log: Whether the choice is uniform in the logarithm.
    """

    low: float
    high: float
    log: bool = False

    def __contains__(self, value: float | None) -> bool:
        return value is not None and self.low <= value <= self.high


#: Chooses the value of the axis of this name from several values.
Chooser: TypeAlias = Callable[[str, Span | tuple[Any, ...]], Any]


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

    @property
    def constants(self) -> dict[str, Any]:
        """Name -> value of the axes that have one value in every configuration."""
        always = {axis.name for axis in AXES if not axis.depends_on}
        points = {name: found for name, found in _choices(self.space).items() if name in always}
        return {name: found[0] for name, found in points.items() if found and len(found) == 1}

    def key(self, configuration: Configuration) -> str:
        """Return a string that is equal for configurations with the same effect.

        They send the same bytes and compute the same. A threshold counts by the tensors that it
        makes large, ``top_k`` by the elements that are sent of all tensors. A ratio counts by the
        tensors that PowerSGD factorises: for one rank these sets are nested, so their number
        identifies them. A rank that factorises nothing does not count, nor do axes that depend on a
        rank.
        """
        values = configuration.values
        predicted = configuration_payload(self.shapes, configuration)
        sizes = [size for phase in predicted.phases for size in phase.elements]
        count = len(predicted.compressed)
        if not count:
            values["powersgd_rank"] = None
        parts = [
            f"codec {_codec_key(values, sizes)}",
            f"powersgd rank {values['powersgd_rank']} on {count}" if count else "powersgd none",
        ]
        others = (axis for axis in AXES if axis.name not in _OF_SHAPES and axis.applies(values))
        return "; ".join([*parts, *(f"{axis.name} {values[axis.name]}" for axis in others)])

    def draw(self, choose: Chooser) -> Configuration:
        """Return the configuration of the chosen values."""

        def value(axis: Axis, values: Values) -> Any:
            points = self._points(axis, values)
            if isinstance(points, Span):
                return points.low if points.low == points.high else choose(axis.name, points)
            return points[0] if len(points) == 1 else choose(axis.name, points)

        return Configuration(**decide(value))

    def _points(self, axis: Axis, values: Values) -> Span | tuple[Any, ...]:
        """Return the values that an axis can have, given the values of the axes before it."""
        distribution: Distribution = getattr(self.space, axis.name)
        if axis.drawn_after and isinstance(distribution, Range):
            sizes = averaged_sizes(self.shapes, {name: values[name] for name in axis.drawn_after})
            distribution = axis.narrowed(distribution, sizes)
        if not isinstance(distribution, Range):
            return distribution
        low, high = distribution.low, distribution.high
        if axis.kind == "integer":
            low, high = math.ceil(low), math.floor(high)
        return Span(low, high, distribution.log)

    def parameters(
        self, configuration: Configuration, trial: Trial | None = None
    ) -> dict[str, Any]:
        """Return the values of the axes that lead to ``configuration``, as far as they can.

        An enqueued configuration may lie outside the space. A value that its axis does not allow
        is left out, and the sampler learns nothing about that axis.

        Args:
            configuration: The configuration.
            trial: Trial that is asked for each of these values, which are queued, so that the
                sampler learns from it.
        """
        wanted = configuration.model_dump()
        found: dict[str, Any] = {}

        def follow(name: str, points: Span | tuple[Any, ...]) -> Any:
            value = wanted[name]
            if value not in points:
                return points.low if isinstance(points, Span) else points[0]
            if trial is not None:
                suggested(trial)(name, points)
            found[name] = value if isinstance(points, Span) else points[points.index(value)]
            return found[name]

        self.draw(follow)
        return found

    def every(self) -> Iterator[Configuration] | None:
        """Yield every configuration once per spelling; None if they are too many to list."""
        points = _choices(self.space)
        listed = {name: values for name, values in points.items() if values is not None}
        if len(listed) < len(points) or math.prod(map(len, listed.values())) > LISTABLE:
            return None
        return combinations(lambda axis: listed[axis.name])

    def size(self, enqueued: Iterable[Configuration] = ()) -> int | None:
        """Return the number of distinct configurations; None if a range makes it unbounded.

        Args:
            enqueued: Further configurations, inside or outside the space.
        """
        if self._listed is None:
            return None
        return len({*self._listed, *map(self.key, enqueued)})

    @cached_property
    def _listed(self) -> dict[str, list[Configuration]] | None:
        """Every configuration, by key; None if they are too many to list."""
        everything = self.every()
        if everything is None:
            return None
        found: dict[str, list[Configuration]] = {}
        for item in everything:
            found.setdefault(self.key(item), []).append(item)
        return found

    def unseen(self, seen: set[str], random: Random | None) -> Configuration | None:
        """Return a configuration whose key is not in ``seen``, or None.

        If the space can be listed the answer is exact. Otherwise it depends on several hundred
        draws. A range is drawn from as the sampler does.

        Args:
            seen: Keys of configurations.
            random: Chooses one of those that are left; None for the first one of a space that can
                be listed.
        """
        ranges = any(isinstance(getattr(self.space, axis.name), Range) for axis in AXES)
        if self._listed is None or (ranges and random is not None):
            random = random or Random(0)
            for _ in range(ENOUGH_DRAWS):
                configuration = self.draw(drawn(random))
                if self.key(configuration) not in seen:
                    return configuration
        left = (items for key, items in (self._listed or {}).items() if key not in seen)
        rest = [item for items in left for item in items]
        if random is None:
            return rest[0] if rest else None
        return random.choice(rest) if rest else None


def _choices(space: Space) -> dict[str, Sequence[Any] | None]:
    """Return every value of each axis; None for a range that cannot be listed."""
    return {axis.name: axis.choices(getattr(space, axis.name)) for axis in AXES}


def check_sampler(config: SweepConfig) -> Iterator[Problem]:
    """Yield the reason why a study cannot have its sampler."""
    if config.sampler != "grid":
        return
    points = _choices(config.space)
    ranges = [name for name, values in points.items() if values is None]
    if ranges:
        named = ", ".join(ranges)
        allowed = f"a grid needs lists of values: {named} is a range; use tpe or random"
        yield Problem("sampler", "grid", allowed)
        return
    size = math.prod(len(values) for values in points.values() if values is not None)
    if size > LISTABLE:
        allowed = f"a grid of at most {LISTABLE} points, not of {size}; use tpe or random"
        yield Problem("sampler", "grid", allowed)


def check_tensors(config: SweepConfig, tensors: int) -> Iterator[Problem]:
    """Yield the settings that the tensors of a workload's module exclude.

    Args:
        config: The study.
        tensors: Parameters of the module.
    """
    enqueued = (item.fragments for item in config.enqueue)
    for value in (*ends(config.space.fragments), *enqueued):
        if is_whole(value, tensors + 1):
            allowed = f"at most {tensors}, the number of tensors of the workload's module"
            yield Problem("space.fragments", value, allowed)


def _codec_key(values: Values, sizes: Sequence[int]) -> str:
    """Return a key of a codec's effect on tensors of these sizes."""
    codec, threshold = made(values["codec"], values["top_k"]), values["threshold"]
    codec.check_threshold(threshold)
    if isinstance(codec, Topk):
        return f"{codec.name} of {codec.sent(sizes)} elements"
    if threshold is None:
        return codec.name
    large = [size for size in sizes if size >= threshold]
    if isinstance(codec, SizeAdaptive) and len(large) in (0, len(sizes)):
        return codec.large.name if large else codec.small.name
    return f"{codec.name} from {min(large)} elements" if large else f"{codec.name} on nothing"


def suggested(trial: Trial) -> Chooser:
    """Return the chooser that follows the suggestions of Optuna's sampler."""

    def choose(name: str, points: Span | tuple[Any, ...]) -> Any:
        if not isinstance(points, Span):
            return trial.suggest_categorical(name, points)
        if isinstance(points.low, int) and isinstance(points.high, int):
            return trial.suggest_int(name, points.low, points.high, log=points.log)
        return trial.suggest_float(name, points.low, points.high, log=points.log)

    return choose


def drawn(random: Random) -> Chooser:
    """Return the chooser that draws each value at random."""

    def choose(name: str, points: Span | tuple[Any, ...]) -> Any:
        if not isinstance(points, Span):
            return random.choice(points)
        low, high = points.low, points.high
        whole = isinstance(low, int) and isinstance(high, int)
        if not points.log:
            return random.randint(int(low), int(high)) if whole else random.uniform(low, high)
        # Every whole number represents the half-open interval around it.
        margin = 0.5 if whole else 0.0
        value = math.exp(random.uniform(math.log(low - margin), math.log(high + margin)))
        return min(high, max(low, round(value) if whole else value))

    return choose
