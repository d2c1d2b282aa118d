"""Dry run: the size, duration and payload of a study, predicted without starting anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rayhive.compression.payload import payload
from rayhive.errors import Problem
from rayhive.metrics.rows import NO_FAULTS
from rayhive.spec import Axis, Configuration, Space
from rayhive.spec.axes.base import ends
from rayhive.spec.configuration import combinations
from rayhive.sweep.link_time import RoundTraffic, round_traffic
from rayhive.sweep.resolve import ResolvedScenario, ResolvedStudy
from rayhive.sweep.space import LISTABLE

#: Configurations that a plan lists; further ones are only counted.
LISTED = 32
#: Axes that determine bytes or samples of a round, besides those that a payload depends on.
_OF_ROUNDS = (
    "average_state_every", "state_codec", "local_steps", "outer_momentum", "inner_state",
    "fragments", "group_size",
)  # fmt: skip


@dataclass(frozen=True)
class PlannedConfiguration:
    """A configuration with its predicted traffic.

    Attributes:
        configuration: The configuration.
        enqueued: Whether the study enqueues it; otherwise it is a corner of the space.
        traffic: Bytes and least time of a round.
        rounds: Rounds of a replicate; None if only seconds limit it.
        bytes_per_sample: Payload that all peers send, by sample of the swarm [B].
    """

    configuration: Configuration
    enqueued: bool
    traffic: RoundTraffic
    rounds: int | None
    bytes_per_sample: float

    @property
    def bytes_per_round(self) -> float:
        """Gradient payload that one peer sends in a round, the mean over the peers [B]."""
        return self.traffic.gradient_bytes

    @property
    def ratio(self) -> float:
        """Dense gradients divided by their payload."""
        return self.traffic.gradients.ratio

    @property
    def compressed(self) -> int:
        """Number of tensors that PowerSGD factorises."""
        return len(self.traffic.gradients.compressed)

    @property
    def exact(self) -> bool:
        """Whether the measured gradient bytes will equal the prediction.

        The size of some codecs depends on the data.
        """
        return self.traffic.gradients.exact


@dataclass(frozen=True)
class Plan:
    """Dry run of a study.

    Attributes:
        study: The study.
        space_size: Distinct configurations in the space; None if a range makes it unbounded.
        trials: Most trials that will run.
        replicates: Most replicates that will run, baselines included.
        rounds: Rounds of one replicate without local steps; None if only seconds limit it.
        longest_s: Longest training time of all replicates together [s], without their starts.
        dense_bytes: Uncompressed gradients of one peer [B].
        configurations: The enqueued configurations and the corners of the space.
        left_out: Corners that are not listed.
        unmet: Demands that the storage or the target does not meet.
    """

    study: ResolvedStudy
    space_size: int | None
    trials: int
    replicates: int
    rounds: int | None
    longest_s: float
    dense_bytes: int
    configurations: tuple[PlannedConfiguration, ...]
    left_out: int
    unmet: tuple[Problem, ...] = ()

    @property
    def link_s(self) -> tuple[float, float] | None:
        """Least and largest time of a replicate's payload on the links [s], by configuration.

        None without limited links, or if only seconds limit a replicate.
        """
        known = [
            row.traffic.seconds * row.rounds
            for row in self.configurations
            if row.traffic.seconds is not None and row.rounds is not None
        ]
        return (min(known), max(known)) if known and self.rounds is not None else None

    @property
    def scenarios(self) -> tuple[ResolvedScenario, ...]:
        """The faulted scenarios."""
        return tuple(item for item in self.study.scenarios if item.name != NO_FAULTS)


def make_plan(study: ResolvedStudy) -> Plan:
    """Return the dry run of a study."""
    config, shapes = study.config, study.workload.shapes
    size = study.space.size(config.enqueue)
    trials = config.budget.trials if size is None else min(config.budget.trials, size)
    replicates = (trials + len(config.baselines)) * study.replicates_per_trial
    rows = list(_rows(study))
    return Plan(
        study=study,
        space_size=size,
        trials=trials,
        replicates=replicates,
        rounds=config.budget.rounds(config.swarm.target_batch_size),
        longest_s=replicates * config.budget.seconds_per_replicate,
        dense_bytes=payload(shapes).dense_bytes,
        configurations=tuple(rows[:LISTED]),
        left_out=max(0, len(rows) - LISTED),
    )


def describe(scenario: ResolvedScenario) -> str:
    """Return the number of planned faults of each kind and the hashes of the plans."""
    kinds = Counter(fault.kind for plan in scenario.plans if plan for fault in plan.faults)
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    hashes = ", ".join(plan.hash[:8] for plan in scenario.plans if plan)
    return f"{faults} in all replicates (plans {hashes})" if faults else "no faults"


def _rows(study: ResolvedStudy) -> Iterator[PlannedConfiguration]:
    """Yield the enqueued configurations, then the other corners, each distinct one once."""
    config = study.config
    workload = study.workload
    distinct: dict[str, Configuration] = {}
    for item in (*config.enqueue, *_corners(config.space)):
        distinct.setdefault(study.space.key(item), item)
    for item in distinct.values():
        traffic = round_traffic(workload.shapes, workload.extras, item, config.swarm)
        size = item.round_size(config.swarm.target_batch_size)
        yield PlannedConfiguration(
            configuration=item,
            enqueued=item in config.enqueue,
            traffic=traffic,
            rounds=config.budget.rounds(size),
            bytes_per_sample=traffic.bytes * config.swarm.peers / size,
        )


def _corners(space: Space) -> Iterator[Configuration]:
    """Yield the points at the ends of every axis, and one point of an axis that sends no bytes."""

    def corners(axis: Axis) -> tuple[Any, ...]:
        points = tuple(dict.fromkeys(ends(getattr(space, axis.name))))
        sends = axis.payload_argument is not None or axis.name in _OF_ROUNDS
        return points if sends else points[:1]

    yield from islice(combinations(corners), LISTABLE)
