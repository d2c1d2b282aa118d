"""What may be combined with what: every rule between fields, hivemind's own included.

hivemind finds some of these at start, some at the first round, and some never: then the
weights silently stay where they are. Here they are all found before anything starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from rayhive.columns import objectives
from rayhive.errors import Problem, nearest, unknown
from rayhive.registry import CODECS, SCENARIOS
from rayhive.spec import DELAYS, MOST, Configuration, Range, is_path

#: Names of scenarios are parts of names of folders and actors.
SCENARIO_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*")

if TYPE_CHECKING:
    from rayhive.spec import Space, SwarmConfig, SweepConfig

#: What the delay axis switches on in ``hivemind.Optimizer``; only these four of the sixteen
#: combinations of flags are valid (with offload, which the last two need).
DELAY_FLAGS: dict[str, dict[str, bool]] = {
    "none": {},
    "state": {"delay_state_averaging": True},
    "optimizer": {
        "delay_state_averaging": True,
        "delay_optimizer_step": True,
        "offload_optimizer": True,
    },
    "gradients": {
        "delay_state_averaging": True,
        "delay_optimizer_step": True,
        "delay_grad_averaging": True,
        "offload_optimizer": True,
    },
}


def check_sweep(config: SweepConfig) -> list[Problem]:
    """Return every rule that a structurally valid study breaks."""
    return [
        *check_swarm(config.swarm),
        *_check_space(config.space, config.swarm),
        *_check_enqueued(config),
        *_check_choices(config),
    ]


def check_swarm(swarm: SwarmConfig) -> Iterator[Problem]:
    """Find what is wrong with the swarm's settings taken together."""
    if swarm.batch_size is not None and swarm.target_batch_size < swarm.batch_size:
        yield Problem(
            "swarm.target_batch_size",
            swarm.target_batch_size,
            f"at least one peer's batch_size ({swarm.batch_size}): "
            "a smaller round is over before it began",
        )
    if swarm.matchmaking_time >= swarm.averaging_timeout:
        yield Problem(
            "swarm.matchmaking_time",
            swarm.matchmaking_time,
            f"less than averaging_timeout ({swarm.averaging_timeout} s)",
        )
    if swarm.state_codec not in CODECS:
        yield unknown("swarm.state_codec", swarm.state_codec, CODECS.names())
    elif CODECS.get(swarm.state_codec).uses_threshold:
        names = [name for name, codec in CODECS.items() if not codec.uses_threshold]
        yield Problem("swarm.state_codec", swarm.state_codec, f"one of {', '.join(names)}")
    if swarm.aggregation != "mean" and swarm.use_local_updates:
        yield Problem(
            "swarm.aggregation",
            swarm.aggregation,
            "mean with swarm.use_local_updates: no gradients are averaged",
        )
    if swarm.node_classes is not None:
        count = sum(node_class.count for node_class in swarm.node_classes.values())
        if count != swarm.peers:
            yield Problem(
                "swarm.peers",
                swarm.peers,
                f"the sum of the counts of swarm.node_classes, which is {count}",
            )


def _points(axis: Any) -> tuple[Any, ...]:
    return (axis.low, axis.high) if isinstance(axis, Range) else tuple(axis)


def _check_space(space: Space, swarm: SwarmConfig) -> Iterator[Problem]:
    for name in ("codec", "threshold", "powersgd_rank", "min_compression_ratio", "delay"):
        axis = getattr(space, name)
        if not isinstance(axis, Range):
            yield from _check_choice(f"space.{name}", axis)
        elif name not in ("codec", "delay") and (
            axis.low > axis.high or (axis.log and axis.low <= 0)
        ):
            yield Problem(
                f"space.{name}", axis.model_dump(), "low ≤ high, and low > 0 where log is true"
            )
    yield from _check_names("space.codec", space.codec, CODECS.names())
    yield from _check_names("space.delay", space.delay, DELAYS)
    for codec in _points(space.codec):
        yield from _check_codec("space.codec", codec)
    yield from _check_threshold("space.threshold", space.threshold)
    yield from _check_rank("space.powersgd_rank", space.powersgd_rank)
    yield from _check_ratio("space.min_compression_ratio", space.min_compression_ratio)

    if "threshold" in space.model_fields_set and not _any_threshold(_points(space.codec)):
        yield Problem(
            "space.threshold",
            _shown(space.threshold),
            "absent: none of the codecs in space.codec has a threshold "
            f"({', '.join(name for name, codec in CODECS.items() if codec.uses_threshold)} has)",
        )
    if "min_compression_ratio" in space.model_fields_set and not _differs(
        space.powersgd_rank, None
    ):
        yield Problem(
            "space.min_compression_ratio",
            _shown(space.min_compression_ratio),
            "absent: it only means something with a space.powersgd_rank",
        )
    if swarm.use_local_updates:
        yield from _check_local_updates(space)
    if swarm.aggregation != "mean" and _differs(space.powersgd_rank, None):
        yield Problem(
            "space.powersgd_rank",
            _shown(space.powersgd_rank),
            f"null with swarm.aggregation {swarm.aggregation}: factors have to be averaged",
        )


def _check_choice(key: str, values: tuple[Any, ...]) -> Iterator[Problem]:
    if not values:
        yield Problem(key, [], "at least one value")
    for index, value in enumerate(values):
        if value in values[:index]:
            yield Problem(key, value, "listed once")


def _check_names(key: str, axis: Any, names: Sequence[str]) -> Iterator[Problem]:
    if isinstance(axis, Range):
        yield Problem(key, axis.model_dump(), "a name or a list of names")
    else:
        for value in axis:
            if not isinstance(value, str) or value not in names:
                yield unknown(key, value, names)


def _check_local_updates(space: Space) -> Iterator[Problem]:
    """Find what hivemind asserts on or, worse, ignores without a word."""
    for delay in _points(space.delay):
        if delay in ("optimizer", "gradients"):
            yield Problem(
                "space.delay",
                delay,
                "none or state with swarm.use_local_updates: there are no gradients to average, "
                "and an offloaded optimizer would never move the weights",
            )
    if _differs(space.powersgd_rank, None):
        yield Problem(
            "space.powersgd_rank",
            _shown(space.powersgd_rank),
            "null with swarm.use_local_updates: gradients are not averaged",
        )
    if _differs(space.codec, "none"):
        yield Problem(
            "space.codec",
            _shown(space.codec),
            "none with swarm.use_local_updates (use swarm.state_codec)",
        )


def _differs(axis: Any, value: object) -> bool:
    """Say whether an axis has a point other than ``value``."""
    return any(point != value for point in _points(axis))


def _check_codec(key: str, codec: object) -> Iterator[Problem]:
    """Find a codec whose optional dependency is not here."""
    entry = _codec(codec)
    if entry is not None and not entry.available():
        yield Problem(key, codec, f"a codec whose dependency is here: install {entry.requires}")


def _codec(name: object) -> Any:
    return CODECS.get(name) if isinstance(name, str) and name in CODECS else None


def _any_threshold(codecs: Sequence[object]) -> bool:
    return any(getattr(_codec(name), "uses_threshold", False) for name in codecs)


def _whole(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value == int(value)


def _shown(axis: Any) -> object:
    if isinstance(axis, Range):
        return axis.model_dump()
    return axis[0] if len(axis) == 1 else list(axis)


def _check_threshold(key: str, axis: Any) -> Iterator[Problem]:
    for value in _points(axis):
        if not _whole(value) or not 1 <= value <= MOST:
            yield Problem(key, value, f"a whole number of elements, from 1 to {MOST}")


def _check_rank(key: str, axis: Any) -> Iterator[Problem]:
    for value in _points(axis):
        if value is not None and (not _whole(value) or not 1 <= value <= MOST):
            allowed = f"a whole number, at least 1 and at most {MOST}, or null for no PowerSGD"
            yield Problem(key, value, allowed)


def _check_ratio(key: str, axis: Any) -> Iterator[Problem]:
    for value in _points(axis):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < 1:
            yield Problem(
                key, value, "at least 0 and less than 1: the fraction saved, not a factor"
            )


def _check_enqueued(config: SweepConfig) -> Iterator[Problem]:
    for index, configuration in enumerate(config.enqueue):
        for problem in check_configuration(configuration, config.swarm):
            yield Problem(
                f"enqueue.{index}.{problem.key}", problem.value, problem.allowed, problem.nearest
            )


def check_configuration(
    configuration: Configuration, swarm: SwarmConfig | None = None
) -> Iterator[Problem]:
    """Find what is wrong with one concrete configuration.

    Args:
        configuration: The settings.
        swarm: The swarm that would use them, for the rules between the two.
    """
    yield from _check_names("codec", (configuration.codec,), CODECS.names())
    yield from _check_codec("codec", configuration.codec)
    if configuration.threshold is not None:
        if not _any_threshold([configuration.codec]):
            yield Problem(
                "threshold", configuration.threshold, f"absent with codec {configuration.codec}"
            )
        yield from _check_threshold("threshold", (configuration.threshold,))
    yield from _check_rank("powersgd_rank", (configuration.powersgd_rank,))
    if configuration.min_compression_ratio is not None:
        if configuration.powersgd_rank is None:
            yield Problem(
                "min_compression_ratio",
                configuration.min_compression_ratio,
                "absent without powersgd_rank",
            )
        yield from _check_ratio("min_compression_ratio", (configuration.min_compression_ratio,))
    factorised = configuration.powersgd_rank is not None
    if swarm is not None and swarm.aggregation != "mean" and factorised:
        yield Problem(
            "powersgd_rank",
            configuration.powersgd_rank,
            f"null with swarm.aggregation {swarm.aggregation}: factors have to be averaged",
        )
    if swarm is not None and swarm.use_local_updates:
        from rayhive.spec import Space

        fields = configuration.model_dump(include={"codec", "powersgd_rank", "delay"})
        for problem in _check_local_updates(Space(**fields)):
            yield Problem(problem.key.removeprefix("space."), problem.value, problem.allowed)


def _check_choices(config: SweepConfig) -> Iterator[Problem]:
    yield from _check_scenarios(config)
    samples, target = config.budget.samples_per_replicate, config.swarm.target_batch_size
    if samples is not None and samples < target:
        yield Problem(
            "swarm.target_batch_size",
            target,
            f"at most budget.samples_per_replicate ({samples}), which is at least one round",
        )
    if config.budget.trials < len(config.enqueue):
        yield Problem(
            "budget.trials",
            config.budget.trials,
            f"at least the {len(config.enqueue)} configurations of enqueue",
        )
    allowed = objectives()
    for name, direction in config.objectives.items():
        if name not in allowed:
            yield Problem(
                f"objectives.{name}",
                name,
                f"one of {', '.join(allowed)}",
                nearest(name, tuple(allowed)),
            )
        elif direction != allowed[name]:
            yield Problem(f"objectives.{name}", direction, allowed[name])
        elif name.startswith("retention") and set(config.scenarios) == {"none"}:
            yield Problem(
                f"objectives.{name}", name, "absent without a scenario in which something breaks"
            )
    if "samples_to_target" in config.objectives and config.budget.samples_per_replicate is None:
        yield Problem(
            "budget.samples_per_replicate",
            None,
            "given with the objective samples_to_target: a replicate that misses the target is "
            "charged a multiple of it",
        )
    if config.budget.stop_at_target and "final_loss" in config.objectives:
        yield Problem(
            "budget.stop_at_target",
            True,
            "false when final_loss is an objective: losses after different sample counts do "
            "not compare",
        )


def _check_scenarios(config: SweepConfig) -> Iterator[Problem]:
    """Find unknown names; what a scenario plans is checked by those who plan it."""
    labels: list[str] = []
    for scenario in config.scenarios:
        if is_path(scenario):
            labels.append(PurePath(scenario).stem)
            if labels[-1] in SCENARIOS:
                yield Problem("scenarios", scenario, "a file with a name that no scenario has")
            elif not SCENARIO_NAME.fullmatch(labels[-1]):
                yield Problem("scenarios", scenario, "a file whose name is letters, digits and -")
        else:
            labels.append(scenario)
            if scenario not in SCENARIOS:
                yield unknown("scenarios", scenario, SCENARIOS.names())
    yield from _check_choice("scenarios", tuple(labels))
    for name, values in config.scenario_args.items():
        if name not in labels:
            yield unknown(f"scenario_args.{name}", values, labels)
