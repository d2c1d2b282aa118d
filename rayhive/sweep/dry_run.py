"""What a study would run, foretold from shapes and budgets; nothing is started."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from rayhive.compression.payload import allreduce_bytes, payload
from rayhive.faults.library import label
from rayhive.faults.queries import needs_of
from rayhive.metrics.rows import NO_FAULTS
from rayhive.spec import Configuration, Range, Space, SweepConfig
from rayhive.spec.fault_plan import FaultPlan
from rayhive.sweep.replicate_runner import replicate_seed
from rayhive.sweep.scenarios import replicate_plan
from rayhive.sweep.space import SearchSpace
from rayhive.sweep.study import Study

#: Configurations that a plan lists; the rest it only counts.
LISTED = 32


@dataclass(frozen=True)
class PlannedConfiguration:
    """One configuration and the gradient payload that it would send.

    Attributes:
        configuration: The configuration.
        enqueued: Whether it is run first, by the study's wish; else it is a corner of the space.
        bytes_per_round: Payload that a peer sends in a round, the mean over the peers [B].
        ratio: Dense payload / this payload.
        compressed: Tensors that PowerSGD factorises.
        exact: Whether measured bytes will equal these; a codec's size may depend on the data.
    """

    configuration: Configuration
    enqueued: bool
    bytes_per_round: float
    ratio: float
    compressed: int
    exact: bool


@dataclass(frozen=True)
class PlannedScenario:
    """What breaks under one scenario.

    Attributes:
        name: The scenario.
        plans: The fault plan of each replicate; None where nothing breaks.
    """

    name: str
    plans: tuple[FaultPlan | None, ...]

    def describe(self) -> str:
        """Say how many faults of which kinds there are, and name the plans by their hashes."""
        kinds = Counter(fault.kind for plan in self.plans if plan for fault in plan.faults)
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        hashes = ", ".join(plan.hash[:8] for plan in self.plans if plan)
        return f"{faults} in all replicates (plans {hashes})" if faults else "no faults"


@dataclass(frozen=True)
class Plan:
    """What a study comes to.

    Attributes:
        study: The study.
        space_size: Distinct configurations in the space, None where a range makes them many.
        trials: Trials that will run at most.
        replicates: Replicates that will run at most.
        rounds: Rounds of one replicate, None where only seconds end it.
        longest_s: Longest training time of all replicates together [s], starting not counted.
        dense_bytes: Gradients of one peer, uncompressed [B].
        scenarios: What breaks, beside ``none``.
        configurations: The enqueued ones and the corners of the space.
        left_out: Corners that are not listed.
    """

    study: Study
    space_size: int | None
    trials: int
    replicates: int
    rounds: int | None
    longest_s: float
    dense_bytes: int
    scenarios: tuple[PlannedScenario, ...]
    configurations: tuple[PlannedConfiguration, ...]
    left_out: int

    @property
    def needs(self) -> dict[str, frozenset[str]]:
        """What the kinds of the faults that are planned need of the machine."""
        plans = [plan for scenario in self.scenarios for plan in scenario.plans if plan is not None]
        return needs_of((fault.kind, fault.args) for plan in plans for fault in plan.faults)


def make_plan(study: Study) -> Plan:
    """Foretell a study."""
    config = study.config
    space = SearchSpace(config.space, study.shapes)
    everything = space.every()
    enqueued = {space.key(item) for item in config.enqueue}
    size = None if everything is None else len({space.key(item) for item in everything} | enqueued)
    trials = config.budget.trials if size is None else min(config.budget.trials, size)
    replicates = trials * len(config.scenarios) * config.replicates
    samples = config.budget.samples_per_replicate
    rows = list(_rows(study, space))
    return Plan(
        study=study,
        space_size=size,
        trials=trials,
        replicates=replicates,
        rounds=None if samples is None else -(-samples // config.swarm.target_batch_size),
        longest_s=replicates * config.budget.seconds_per_replicate,
        dense_bytes=payload(study.shapes).dense_bytes,
        scenarios=tuple(_scenarios(config)),
        configurations=tuple(rows[:LISTED]),
        left_out=max(0, len(rows) - LISTED),
    )


def _scenarios(config: SweepConfig) -> Iterator[PlannedScenario]:
    seeds = [replicate_seed(config.seed, number) for number in range(config.replicates)]
    for name in config.scenarios:
        if name != NO_FAULTS:
            plans = tuple(replicate_plan(config, name, seed) for seed in seeds)
            yield PlannedScenario(label(name), plans)


def _rows(study: Study, space: SearchSpace) -> Iterator[PlannedConfiguration]:
    """Yield enqueued configurations, then corners that are none of them, each once."""
    config = study.config
    seen: set[str] = set()
    corners = _corners(config.space)
    for item, enqueued in (
        *((one, True) for one in config.enqueue),
        *((c, False) for c in corners),
    ):
        key = space.key(item)
        if key in seen:
            continue
        seen.add(key)
        predicted = payload(
            study.shapes,
            codec=item.codec,
            threshold=item.threshold,
            powersgd_rank=item.powersgd_rank,
            min_compression_ratio=item.min_compression_ratio,
        )
        sent = allreduce_bytes(predicted.bytes_per_transfer, config.swarm.peers)
        yield PlannedConfiguration(
            item, enqueued, float(sent), predicted.ratio, len(predicted.compressed), predicted.exact
        )


def _corners(space: Space) -> Iterator[Configuration]:
    """Yield the points at the ends of every axis; delay changes no bytes, so one will do."""
    ends: dict[str, tuple[object, ...]] = {}
    for name in Space.model_fields:
        axis = getattr(space, name)
        ends[name] = (axis.low, axis.high) if isinstance(axis, Range) else tuple(axis)
    ends["delay"] = ends["delay"][:1]
    product = SearchSpace(Space.model_validate(ends), ()).every()
    yield from islice(product or (), 10_000)
