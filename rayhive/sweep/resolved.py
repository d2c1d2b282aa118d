"""Resolved study: every default, scenario, fault plan and demand of a study, derived once.

:func:`rayhive.sweep.resolve.resolve` builds it. The dry run, the pre-flight check, the driver and
the replicates read it and derive nothing themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rayhive.spec import SwarmConfig, SweepConfig
from rayhive.spec.fault_plan import FaultPlan
from rayhive.sweep.space import SearchSpace

#: Capabilities that a testbed provides: shaped links, and nodes that can be ended or drained.
_OF_A_TESTBED = frozenset({"link", "node", "nodes", "drain"})


def replicate_seed(seed: int, replicate: int) -> int:
    """Return the seed of a replicate number: the same for every configuration of a study."""
    digest = hashlib.blake2b(f"{seed}/{replicate}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class WorkloadFacts:
    """Properties of a workload that a sweep needs.

    Attributes:
        shapes: Shapes of the parameters, from which payload is predicted.
        batch_size: Samples in one micro-batch of one peer.
        data: Whether the data is ``real`` or ``generated``.
        data_files: Files and folders of data that the workload names.
    """

    shapes: tuple[tuple[int, ...], ...]
    batch_size: int
    data: str
    data_files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ResolvedScenario:
    """A scenario of a study with the fault plans of its replicates.

    Attributes:
        name: Name in result rows and in the folders of replicates.
        plans: Fault plan of each replicate number; None if no fault is planned.
    """

    name: str
    plans: tuple[FaultPlan | None, ...]


@dataclass(frozen=True)
class Demands:
    """Requirements that a swarm and its faults place on the nodes.

    Attributes:
        swarm: The swarm.
        needs: Kind of fault -> capabilities of :data:`rayhive.faults.target.CAPABILITIES` that a
            node must have for it.
        optional: The same for kinds that are left out where a node lacks one (``available_only``).
        joining: Most peers that join after the start.
    """

    swarm: SwarmConfig
    needs: Mapping[str, frozenset[str]]
    joining: int = 0
    optional: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def testbed(self) -> bool:
        """Whether nodes with shaped links or CPU shares, or nodes that can be ended, are needed."""
        classes = (self.swarm.node_classes or {}).values()
        wanted = frozenset().union(*self.needs.values(), *self.optional.values())
        return any(item.shaped for item in classes) or bool(wanted & _OF_A_TESTBED)


def most_joining(plans: Iterable[FaultPlan | None]) -> int:
    """Return the largest number of peers that any of the plans adds to a swarm."""
    return max((len(plan.joins) for plan in plans if plan is not None), default=0)


@dataclass(frozen=True)
class ResolvedStudy:
    """A study that is ready to run.

    Attributes:
        config: The study with defaults filled in, enqueued configurations complete and grids of
            scenarios replaced by their members. A run folder keeps it.
        workload: Properties of the workload.
        scenarios: The scenarios in the order of the study, the twin included.
        demands: Requirements on the nodes.
        twin_added: Whether the scenario ``none`` was added as the twin of the faulted ones.
    """

    config: SweepConfig
    workload: WorkloadFacts
    scenarios: tuple[ResolvedScenario, ...]
    demands: Demands
    twin_added: bool = False

    @cached_property
    def space(self) -> SearchSpace:
        """The configurations that the study may try."""
        return SearchSpace(self.config.space, self.workload.shapes)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each replicate number."""
        return tuple(replicate_seed(self.config.seed, n) for n in range(self.config.replicates))

    @property
    def replicates_per_trial(self) -> int:
        """Replicates of one trial, over all scenarios."""
        return len(self.scenarios) * self.config.replicates
