"""Room on the cluster for the peers of a replicate, held as a Ray placement group."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import util
from ray.util import scheduling_strategies as strategies
from ray.util.placement_group import PlacementGroup

from rayhive.cluster.capacity import grows
from rayhive.cluster.node import raylets
from rayhive.cluster.node.raylets import rooms
from rayhive.cluster.replicate.placement import Bundle, bundles
from rayhive.errors import ClusterError
from rayhive.spec.replicate import ReplicateSpec

_POLL_S = 2.0


class Reservation:
    """One bundle of resources for each peer, including the peers that join later.

    Args:
        spec: The replicate.

    Attributes:
        bundles: Bundle of each peer; empty before :meth:`place`.
        nodes: Ray's id of the node of each bundle; empty before :meth:`place`.
    """

    def __init__(self, spec: ReplicateSpec) -> None:
        self.bundles: list[Bundle] = []
        self.nodes: list[str] = []
        self._spec = spec
        self._group: PlacementGroup | None = None

    async def place(self, timeout: float) -> None:
        """Reserve the bundles; wait while other replicates hold the room.

        Args:
            timeout: Longest wait [s].

        Raises:
            ClusterError: A node of the testbed is down, or there is no room in time.
        """
        if down := await asyncio.to_thread(raylets.missing):
            numbers = ", ".join(map(str, down))
            raise ClusterError(f"node {numbers} of the testbed is down: take it down and up again")
        together = self._spec.swarm.peers
        later, waited = self._spec.replicas - together, 0.0
        growing = await asyncio.to_thread(grows)
        while not self.bundles:
            draining = await asyncio.to_thread(raylets.draining)
            present = [r for r in await asyncio.to_thread(rooms) if r.node not in draining]
            try:
                self.bundles = bundles(self._spec.swarm, present, later, growing)
            except ValueError as error:  # a node that is gone may come back
                if waited >= timeout:
                    raise ClusterError(
                        f"{error} within {timeout:g} s (timeouts.placing)"
                    ) from error
                waited += _POLL_S
                await asyncio.sleep(_POLL_S)
        several = growing or len({room.node for room in present}) > 1
        group = await asyncio.to_thread(self._reserve, several)
        while not await asyncio.to_thread(group.wait, min(_POLL_S, timeout)):
            waited += _POLL_S
            if waited >= timeout:
                wanted = f"{together} peers within {timeout:g} s (timeouts.placing)"
                grew = "; the autoscaler added too few nodes" if growing else ""
                raise ClusterError(f"no room for {wanted}{grew}")
        table = await asyncio.to_thread(util.placement_group_table, group)
        places = table["bundles_to_node_id"]
        self.nodes = [places[index] for index in range(len(self.bundles))]

    def _reserve(self, several: bool) -> PlacementGroup:
        labels = [bundle.labels for bundle in self.bundles]
        self._group = util.placement_group(
            [bundle.resources for bundle in self.bundles],
            # Links between machines are measured, so peers are spread over the machines.
            strategy="SPREAD" if several else "PACK",
            name=self._spec.run_id,
            bundle_label_selector=labels if any(labels) else None,
        )
        return self._group

    def node_of(self, peer: int) -> str:
        """Return Ray's id of the node where room is reserved for a peer, by its number.

        Raises:
            ClusterError: Nothing is reserved yet.
        """
        if not self.nodes:
            raise ClusterError("peers are placed before they are spawned")
        return self.nodes[peer]

    def actor_options(self, peer: int, node: str) -> dict[str, Any]:
        """Return Ray's options for the actor of a peer.

        On the peer's own node it takes its bundle. On another node it takes no cores, as none were
        reserved there.

        Args:
            peer: Number of the peer.
            node: Ray's id of the node that the actor is placed on.
        """
        bundle = self.bundles[peer]
        if self._group is not None and node == self.nodes[peer]:
            inside = strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=peer
            )
            own: dict[str, Any] = {"num_cpus": bundle.cpus, "scheduling_strategy": inside}
        else:
            beside = strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            own = {"num_cpus": 0, "scheduling_strategy": beside}
        return {**own, "num_gpus": bundle.gpus}

    async def release(self) -> None:
        """Give the room back."""
        if self._group is not None:
            await asyncio.to_thread(util.remove_placement_group, self._group)
