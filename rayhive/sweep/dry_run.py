"""Dry run: the size, duration and payload of a study, predicted without starting anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rayhive.compression.payload import allreduce_bytes, configuration_payload, payload
from rayhive.errors import Problem
from rayhive.metrics.rows import NO_FAULTS
from rayhive.spec import Axis, Configuration, Space
from rayhive.spec.axes.base import ends
from rayhive.spec.configuration import combinations
from rayhive.sweep.resolve import ResolvedScenario, ResolvedStudy
from rayhive.sweep.space import LISTABLE

#: Configurations that a plan lists; further ones are only counted.
LISTED = 32


@dataclass(frozen=True)
class PlannedConfiguration:
    """A configuration with its predicted gradient payload.

    Attributes:
        configuration: The configuration.
        enqueued: Whether the study enqueues it; otherwise it is a corner of the space.
        bytes_per_round: Payload that one peer sends in a round, the mean over the peers [B].
        ratio: Dense payload divided by this payload.
        compressed: Tensors that PowerSGD factorises.
        exact: Whether the measured bytes will equal the prediction; the size of some codecs depends
            on the data.
    """

    configuration: Configuration
    enqueued: bool
    bytes_per_round: float
    ratio: float
    compressed: int
    exact: bool


@dataclass(frozen=True)
class Plan:
    """Dry run of a study.

    Attributes:
        study: The study.
        space_size: Distinct configurations in the space; None if a range makes it unbounded.
        trials: Most trials that will run.
        replicates: Most replicates that will run.
        rounds: Rounds of one replicate; None if only seconds limit it.
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
    def scenarios(self) -> tuple[ResolvedScenario, ...]:
        """The faulted scenarios."""
        return tuple(item for item in self.study.scenarios if item.name != NO_FAULTS)


def make_plan(study: ResolvedStudy) -> Plan:
    """Return the dry run of a study."""
    config, shapes = study.config, study.workload.shapes
    size = study.space.size(config.enqueue)
    trials = config.budget.trials if size is None else min(config.budget.trials, size)
    replicates = trials * study.replicates_per_trial
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
    rates = [config.swarm.link_rate(peer) for peer in range(config.swarm.peers)]
    distinct: dict[str, Configuration] = {}
    for item in (*config.enqueue, *_corners(config.space)):
        distinct.setdefault(study.space.key(item), item)
    for item in distinct.values():
        enqueued = item in config.enqueue
        predicted = configuration_payload(study.workload.shapes, item, rates=rates)
        sent = allreduce_bytes(predicted.bytes_per_transfer, config.swarm.peers)
        yield PlannedConfiguration(
            item, enqueued, float(sent), predicted.ratio, len(predicted.compressed), predicted.exact
        )


def _corners(space: Space) -> Iterator[Configuration]:
    """Yield the points at the ends of every axis, and one point of an axis that sends no bytes."""

    def corners(axis: Axis) -> tuple[Any, ...]:
        points = tuple(dict.fromkeys(ends(getattr(space, axis.name))))
        return points if axis.payload_argument is not None else points[:1]

    yield from islice(combinations(corners), LISTABLE)
