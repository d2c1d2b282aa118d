"""Claims on nodes, by which replicates of all sweeps on a cluster keep apart.

Every node of Ray has a resource ``node:ADDRESS`` of amount 1. A swarm that may not share its nodes
reserves all of it on each of them, together with the cores of its peers; a swarm that may share
reserves a trace. Ray then never places a replicate beside one that has its nodes to itself, whoever
started either, and frees a claim with the supervisor that holds it. Replicates that wait for the
same node are placed in the order of their requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rayhive.cluster.replicate.placement import GRAIN, Bundle, Room, bundles, demands, fits
from rayhive.spec import SwarmConfig

#: Largest number of replicates that are run at the same time without being asked for.
MOST = 64


def claim_name(room: Room) -> str:
    """Return the resource by which a node is claimed."""
    return f"node:{room.address}"


def can_be_claimed(rooms: Sequence[Room]) -> bool:
    """Return whether every node has an address of its own; simulated clusters share one."""
    return len({room.address for room in rooms}) == len(rooms)


def spread(asked: Sequence[Bundle], rooms: Sequence[Room]) -> list[Room] | None:
    """Return the node of each bundle, on as many nodes as possible; None if they do not fit.

    Args:
        asked: The bundles.
        rooms: The nodes, with the cores and GPUs that are free.
    """
    held: dict[int, list[Bundle]] = {index: [] for index in range(len(rooms))}
    chosen: dict[int, int] = {}
    order = sorted(range(len(asked)), key=lambda i: _weight(asked[i]), reverse=True)
    for number in order:
        bundle = asked[number]
        for index in sorted(held, key=lambda i: (len(held[i]), rooms[i].gpus, -rooms[i].cpus, i)):
            more = [*held[index], bundle]
            if rooms[index].carries(bundle.labels) and fits(more, [rooms[index]]):
                held[index], chosen[number] = more, index
                break
        else:
            return None
    return [rooms[chosen[number]] for number in range(len(asked))]


def _weight(bundle: Bundle) -> tuple[int, float, float]:
    return len(bundle.labels), bundle.gpus, bundle.cpus


def shape(nodes: Sequence[Room]) -> list[int]:
    """Return the number of peers on each node, in ascending order."""
    return sorted(Counter(room.node for room in nodes).values())


@dataclass(frozen=True)
class Choice:
    """Nodes of a swarm: one for each bundle.

    Attributes:
        nodes: Node of each bundle.
        shared: Whether other replicates may use the nodes at the same time.
    """

    nodes: list[Room]
    shared: bool

    def resources(self, asked: Sequence[Bundle]) -> list[dict[str, float]]:
        """Return what is reserved for each bundle, its part of the claim included."""
        peers = Counter(room.node for room in self.nodes)
        found, seen = [], set()
        for bundle, room in zip(asked, self.nodes, strict=True):
            whole = not self.shared and room.node not in seen
            seen.add(room.node)
            part = 1.0 - GRAIN * (peers[room.node] - 1) if whole else GRAIN
            found.append({**bundle.resources, claim_name(room): round(part, 4)})
        return found


def choose(
    asked: Sequence[Bundle],
    present: Sequence[Room],
    free: Mapping[str, Mapping[str, float]],
    shared: bool,
    awaited: frozenset[str] = frozenset(),
) -> Choice | None:
    """Return nodes that are free now, with as many peers on each as on an idle cluster.

    Args:
        asked: The bundle of each peer.
        present: The nodes, as they are when idle.
        free: Ray's id of a node -> its resources that are free.
        shared: Whether other replicates may use the nodes at the same time.
        awaited: Claims that another replicate waits for.
    """
    idle = spread(asked, present)
    if idle is None:
        return None
    least = GRAIN * len(asked) if shared else 1.0
    rooms = [
        replace(room, cpus=has.get("CPU", 0.0), gpus=has.get("GPU", 0.0))
        for room in present
        if (has := free.get(room.node, {})).get(claim_name(room), 0.0) >= least - GRAIN / 2
        and claim_name(room) not in awaited
    ]
    nodes = spread(asked, rooms)
    return Choice(nodes, shared) if nodes is not None and shape(nodes) == shape(idle) else None


def most_at_once(swarm: SwarmConfig, present: Sequence[Room], joining: int = 0) -> int:
    """Return how many replicates of a swarm these nodes can run at the same time, at least 1.

    With ``swarm.share_nodes`` they are as many as get all of their cores and GPUs; otherwise as
    many as get nodes to themselves.

    Args:
        swarm: The peers that start together.
        present: The nodes, as they are when idle.
        joining: Most peers that join later.
    """
    if swarm.share_nodes:
        return _copies(demands(swarm, joining), present)
    try:
        asked = bundles(swarm, present, joining)
    except ValueError:
        return 1
    idle = spread(asked, present) if can_be_claimed(present) else None
    if idle is None:
        return 1
    left, count = list(present), 0
    while (nodes := spread(asked, left)) is not None and shape(nodes) == shape(idle):
        taken = {room.node for room in nodes}
        left, count = [room for room in left if room.node not in taken], count + 1
    return min(max(1, count), MOST)


def _copies(asked: Sequence[Bundle], rooms: Sequence[Room]) -> int:
    count = 1
    while count < MOST and fits([*asked] * (count + 1), rooms):
        count += 1
    return count
