"""Target of a run: the cluster that a study or a replicate runs on.

The pre-flight check belongs to the target. On a Ray of rayhive's own, this machine must have the
capabilities and GPUs that the run demands. On a cluster that the user names, its nodes must, and
they are asked once the cluster is joined: the machine of the driver does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from rayhive.cluster.address import named
from rayhive.cluster.node import capabilities
from rayhive.cluster.replicate.placement import gpu_problems, this_machine
from rayhive.errors import ConfigError, Problem
from rayhive.sweep.replicate_runner import Swarms
from rayhive.sweep.resolve import Demands, ResolvedStudy, planned_on

#: Connects to the cluster at an address; without one, starts a Ray on this machine.
Connect = Callable[[str | None], AbstractContextManager[Swarms]]


def connect_to_ray(address: str | None) -> AbstractContextManager[Swarms]:
    """Connect to the Ray cluster at ``address``, or start one on this machine."""
    from rayhive.cluster.cluster import Cluster

    return Cluster.connect(address)


class Target(Protocol):
    """Place of a run: a named cluster, or else a Ray of rayhive's own on this machine."""

    def planned(self, study: ResolvedStudy) -> ResolvedStudy:
        """Return a study without the optional kinds of faults that are known to be refused.

        On a named cluster there are none before it is joined.
        """

    def problems(self, demands: Demands) -> Iterator[Problem]:
        """Yield the demands that are known to be unmet before Ray is started."""

    def cluster(
        self, demands: Demands, connected: Callable[[], None]
    ) -> AbstractContextManager[Swarms]:
        """Connect to the cluster, or start a Ray, with the testbed that the demands may need.

        Args:
            demands: The demands, which are checked.
            connected: Called right after the connection: Ray replaces signal handlers.

        Raises:
            ConfigError: The cluster does not meet the demands.
            ClusterError: It does not start or cannot be joined.
        """

    def placed(
        self, study: ResolvedStudy, connected: Callable[[], None]
    ) -> AbstractContextManager[tuple[Swarms, ResolvedStudy]]:
        """Connect as :meth:`cluster` does, and plan the faults of a study for the cluster.

        The study that is yielded has no optional kinds of faults that the cluster refuses.
        """


def target_at(address: str | None = None, connect: Connect | None = None) -> Target:
    """Return the target of a run.

    Args:
        address: Address of a Ray cluster; None for ``RAY_ADDRESS``, or else for this machine.
        connect: Replaces :func:`connect_to_ray`.
    """
    return _RayTarget(address, connect or connect_to_ray)


@dataclass(frozen=True)
class _RayTarget:
    address: str | None
    connect: Connect

    def planned(self, study: ResolvedStudy) -> ResolvedStudy:
        return planned_on(study, self._refused(study.demands.optional))

    def _refused(self, needs: Mapping[str, frozenset[str]]) -> list[Problem]:
        if named(self.address) or not needs:
            return []
        return capabilities.missing(needs, capabilities.here())

    def problems(self, demands: Demands) -> Iterator[Problem]:
        yield from self._refused(demands.needs)
        if not named(self.address):
            yield from gpu_problems(demands.swarm, [this_machine()])

    @contextmanager
    def cluster(self, demands: Demands, connected: Callable[[], None]) -> Iterator[Swarms]:
        host: AbstractContextManager[str | None] = nullcontext(self.address)
        if demands.testbed:
            from rayhive.cluster.testbed.lifecycle import hosted

            host = hosted(demands.swarm, self.address, demands.joining)
        with host as address, self.connect(address) as cluster:
            connected()
            problems = list(cluster.check_room(demands.swarm))
            problems += cluster.check_kinds(demands.needs, demands.swarm)
            if problems:
                raise ConfigError(problems)
            yield cluster

    @contextmanager
    def placed(
        self, study: ResolvedStudy, connected: Callable[[], None]
    ) -> Iterator[tuple[Swarms, ResolvedStudy]]:
        demands = study.demands
        with self.cluster(demands, connected) as cluster:
            refused = cluster.check_kinds(demands.optional, demands.swarm)
            yield cluster, planned_on(study, refused)
