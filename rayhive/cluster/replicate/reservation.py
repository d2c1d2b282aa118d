"""Room on the cluster for the peers of a replicate, held as a Ray placement group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from ray import util
from ray.util import scheduling_strategies as strategies
from ray.util.placement_group import PlacementGroup

from rayhive.cluster.actors import RUN_IDS
from rayhive.cluster.capacity import grows
from rayhive.cluster.node import raylets
from rayhive.cluster.node.raylets import rooms
from rayhive.cluster.replicate.claims import (
    Choice,
    can_be_claimed,
    choose,
    claim_name,
    spread,
)
from rayhive.cluster.replicate.placement import Bundle, Room, bundles
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
        choice: The claimed nodes; None if Ray chooses them, without a claim.
    """

    def __init__(self, spec: ReplicateSpec) -> None:
        self.bundles: list[Bundle] = []
        self.nodes: list[str] = []
        self.choice: Choice | None = None
        self._spec = spec
        self._group: PlacementGroup | None = None
        self._several = False

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
            present = await asyncio.to_thread(_usable)
            try:
                self.bundles = bundles(self._spec.swarm, present, later, growing)
            except ValueError as error:  # a node that is gone may come back
                if waited >= timeout:
                    raise ClusterError(
                        f"{error} within {timeout:g} s (timeouts.placing)"
                    ) from error
                waited += _POLL_S
                await asyncio.sleep(_POLL_S)
        self._several = growing or len({room.node for room in present}) > 1
        self.choice = await asyncio.to_thread(self._choose)
        if self.choice is None and not growing:
            self.choice = await asyncio.to_thread(self._queue)
        group = await asyncio.to_thread(self._reserve)
        while not await asyncio.to_thread(group.wait, min(_POLL_S, timeout)):
            claimed = await asyncio.to_thread(self._others_claim)
            # the time in which other replicates have the nodes does not count
            waited += 0.0 if claimed else _POLL_S
            if waited >= timeout:
                wanted = f"{together} peers within {timeout:g} s (timeouts.placing)"
                grew = "; the autoscaler added too few nodes" if growing else ""
                raise ClusterError(f"no room for {wanted}{grew}")
            other = await asyncio.to_thread(self._reconsider, claimed)
            group = group if other is None else other
        table = await asyncio.to_thread(util.placement_group_table, group)
        places = table["bundles_to_node_id"]
        self.nodes = [places[index] for index in range(len(self.bundles))]

    def _choose(self) -> Choice | None:
        """Return nodes that are free to be claimed now, if there are any."""
        present = _usable()
        if not can_be_claimed(present):
            return None
        shared = self._spec.swarm.share_nodes
        # one that may share could always go before one that may not
        awaited = frozenset(self._awaited()) if shared else frozenset()
        return choose(self.bundles, present, raylets.free(), shared, awaited)

    def _queue(self) -> Choice | None:
        """Return nodes to wait for while other replicates have them; None if none has."""
        present = _usable()
        if not can_be_claimed(present) or not self._others_claim():
            return None
        nodes = spread(self.bundles, present)
        return None if nodes is None else Choice(nodes, self._spec.swarm.share_nodes)

    def _reconsider(self, claimed: bool) -> PlacementGroup | None:
        """Reserve other nodes if they are free, or any if the chosen ones are not claimed.

        Other programs may use the cores of a node that no replicate has claimed.
        """
        better = self._choose()
        if better is not None and claimed and better != self.choice:
            self.choice = better
        elif self.choice is not None and not claimed:
            self.choice = None
        else:
            return None
        if self._group is not None:
            util.remove_placement_group(self._group)
        return self._reserve()

    def _others_claim(self) -> bool:
        """Return whether another replicate has claimed a node."""
        free = raylets.free()
        names = [(room.node, claim_name(room)) for room in rooms()]
        return any(free.get(node, {name: 1.0}).get(name, 0.0) < 1.0 for node, name in names)

    def _awaited(self) -> Iterator[str]:
        """Yield the claims that other replicates wait for."""
        for entry in _groups():
            if entry["state"] != "CREATED" and entry["name"] != self._spec.run_id:
                for resources in entry["bundles"].values():
                    yield from (name for name, part in resources.items() if _is_whole(name, part))

    def neighbours(self) -> list[str]:
        """Return the run ids of other replicates that have room on the same nodes now."""
        return sorted(
            str(entry["name"])
            for entry in _groups()
            if entry["state"] == "CREATED"
            and entry["name"] != self._spec.run_id
            and {*entry["bundles_to_node_id"].values()} & {*self.nodes}
        )

    @property
    def is_alone(self) -> bool:
        """Whether no other replicate can get room on the nodes."""
        return self.choice is not None and not self.choice.shared

    def _reserve(self) -> PlacementGroup:
        labels = [bundle.labels for bundle in self.bundles]
        wanted = [bundle.resources for bundle in self.bundles]
        self._group = util.placement_group(
            wanted if self.choice is None else self.choice.resources(self.bundles),
            # Links between machines are measured, so peers are spread over the machines.
            strategy="SPREAD" if self._several else "PACK",
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

        Ray gives GPUs to the actor of a bundle. Without them the bundle only keeps the cores, and
        the actor, which needs none, can outlive it. On another node no cores were reserved.

        Args:
            peer: Number of the peer.
            node: Ray's id of the node that the actor is placed on.
        """
        bundle = self.bundles[peer]
        if bundle.gpus and self._group is not None and node == self.nodes[peer]:
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


def _usable() -> list[Room]:
    """Return the nodes that are not about to end."""
    draining = raylets.draining()
    return [room for room in rooms() if room.node not in draining]


def _groups() -> Iterator[Mapping[str, Any]]:
    """Yield Ray's entries about the room of replicates, of all sweeps on the cluster."""
    for entry in util.placement_group_table().values():
        if entry["state"] != "REMOVED" and RUN_IDS.fullmatch(str(entry["name"])):
            yield entry


def _is_whole(name: str, part: float) -> bool:
    return name.startswith("node:") and part > 0.5
