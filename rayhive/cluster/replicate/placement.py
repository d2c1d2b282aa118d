"""Placement of a swarm: the bundle of each peer, and demands that a cluster can never meet.

GPUs and labels are demands. Cores are not: a swarm of eight peers must run on a laptop with two
cores, only slower. If the cluster has enough cores, a peer takes one for each of its threads.
Otherwise it takes the largest equal share with which the whole swarm fits. The swarm then has the
cluster to itself, and other replicates wait. On a cluster with an autoscaler, peers always demand
their full cores, because the autoscaler adds no node for a demand that the present nodes meet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rayhive.cluster.node import machine
from rayhive.cluster.testbed.config import CLASS_LABEL, shape_labels
from rayhive.errors import Problem, nearest
from rayhive.spec import NodeClass, SwarmConfig

#: Smallest amount of a resource that Ray distinguishes.
GRAIN = 1e-4


@dataclass(frozen=True)
class Room:
    """One node and its resources.

    Attributes:
        node: Ray's id of the node.
        cpus: Its logical CPUs.
        gpus: Its GPUs.
        labels: Its labels.
        address: Its address for Ray.
        alive: Whether it is in the cluster.
    """

    node: str
    cpus: float
    gpus: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    address: str = ""
    alive: bool = True

    def carries(self, labels: dict[str, str]) -> bool:
        """Return whether the node has all of ``labels``."""
        return all(self.labels.get(key) == value for key, value in labels.items())


@dataclass(frozen=True)
class Bundle:
    """Demand of one peer.

    Attributes:
        cpus: Logical CPUs.
        gpus: GPUs.
        labels: Labels that its node must have.
    """

    cpus: float
    gpus: float
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def resources(self) -> dict[str, float]:
        """The bundle in the form that Ray takes."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def demands(swarm: SwarmConfig, later: int = 0) -> list[Bundle]:
    """Return the full demand of each peer, in the order of the peers.

    Args:
        swarm: The peers that start together.
        later: Number of peers that join later; their demand is that of the last peer.
    """
    together = [
        Bundle(float(swarm.threads_per_peer) * item.cpu_share, item.gpus, labels)
        for item, _, _, labels in _classes(swarm)
        for _ in range(item.count)
    ]
    return together + [together[-1]] * later


class _Class(NamedTuple):
    """A node class, its key in the study, the key of its GPUs, and the labels of its nodes."""

    node_class: NodeClass
    key: str
    gpu_key: str
    labels: dict[str, str]


def _classes(swarm: SwarmConfig) -> Iterator[_Class]:
    """Yield the node classes of a swarm; one without demands on nodes if the study has none."""
    if swarm.node_classes is None:
        only = NodeClass(count=swarm.peers, gpus=swarm.gpus_per_peer)
        yield _Class(only, "swarm", "swarm.gpus_per_peer", {})
    for name, item in (swarm.node_classes or {}).items():
        labels = dict(item.labels)
        if item.shaped:
            share = item.cpu_share * swarm.threads_per_peer if item.cpu_share != 1.0 else None
            labels |= {CLASS_LABEL: name, **shape_labels(item.link, share)}
        key = f"swarm.node_classes.{name}"
        yield _Class(item, key, f"{key}.gpus", labels)


def bundles(
    swarm: SwarmConfig, rooms: Sequence[Room], later: int = 0, growing: bool = False
) -> list[Bundle]:
    """Return the bundle of each peer on this cluster.

    Args:
        swarm: The peers that start together.
        rooms: The present nodes.
        later: Number of peers that join later.
        growing: Whether nodes are added on demand.

    Raises:
        ValueError: Not even the smallest share fits; :func:`problems` returns the reasons.
    """
    wanted = demands(swarm, later)
    if growing:
        return wanted
    for scale in _scales(wanted, rooms):
        scaled = [
            Bundle(max(GRAIN, int(b.cpus * scale / GRAIN) * GRAIN), b.gpus, b.labels)
            for b in wanted
        ]
        if fits(scaled, rooms):
            return scaled
    raise ValueError("no room for the swarm on this cluster")


def _scales(wanted: Sequence[Bundle], rooms: Sequence[Room]) -> Iterator[float]:
    """Yield the scales at which one more peer fits on a node, in descending order."""
    largest = max(bundle.cpus for bundle in wanted)
    found = {1.0}
    for room in rooms:
        for count in range(1, len(wanted) + 1):
            found.add(min(1.0, room.cpus / count / largest))
    yield from sorted((scale for scale in found if scale > 0), reverse=True)
    yield GRAIN / largest


def this_machine() -> Room:
    """Return the resources of an embedded Ray on this machine."""
    found = machine.facts()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(found["gpus"])
    if visible is not None:
        gpus = min(gpus, len([name for name in visible.split(",") if name.strip()]))
    return Room("this machine", float(found["cores"]), float(gpus))


class _Devices:
    """GPUs of one node.

    A demand below 1 is a share of a single device, a larger one takes whole devices.
    """

    def __init__(self, gpus: float) -> None:
        rest = gpus - int(gpus)
        self._free = [1.0] * int(gpus) + ([rest] if rest > GRAIN else [])

    def take(self, gpus: float) -> bool:
        """Take a share from the fullest device that has room, or whole devices."""
        if gpus <= GRAIN / 2:
            return True
        if gpus < 1:
            open_ = [i for i, free in enumerate(self._free) if free + GRAIN / 2 >= gpus]
            if not open_:
                return False
            self._free[min(open_, key=lambda i: self._free[i])] -= gpus
            return True
        whole = [i for i, free in enumerate(self._free) if free + GRAIN / 2 >= 1]
        if len(whole) + GRAIN < gpus:
            return False
        for index in whole[: round(gpus)]:
            self._free[index] = 0.0
        return True

    def peers(self, gpus: float) -> int:
        """Return the number of peers with this demand that the free devices hold."""
        if gpus < 1:
            return sum(int((free + GRAIN / 2) / gpus) for free in self._free)
        return int(sum(free + GRAIN / 2 >= 1 for free in self._free) // gpus)


def fits(asked: Sequence[Bundle], rooms: Sequence[Room]) -> bool:
    """Return whether all bundles fit at once, by first fit in descending order of demand.

    First fit is not optimal in general, but the peers of a class are equal and classes are few.
    """
    cores = [room.cpus for room in rooms]
    devices = [_Devices(room.gpus) for room in rooms]
    order = sorted(asked, key=lambda b: (len(b.labels), b.gpus, b.cpus), reverse=True)
    for bundle in order:
        # Nodes without GPUs come first, to keep GPUs for the peers that need them.
        choice = sorted(range(len(rooms)), key=lambda i: (rooms[i].gpus, -cores[i]))
        for index in choice:
            enough = cores[index] + GRAIN / 2 >= bundle.cpus
            carries = rooms[index].carries(bundle.labels)
            if enough and carries and devices[index].take(bundle.gpus):
                cores[index] -= bundle.cpus
                break
        else:
            return False
    return True


def problems(swarm: SwarmConfig, rooms: Sequence[Room]) -> list[Problem]:
    """Return the demands of a swarm that these nodes cannot meet even when they are idle."""
    found: list[Problem] = []
    for each in _classes(swarm):
        matching = [room for room in rooms if room.carries(each.labels)]
        if matching or not each.labels:
            found += _gpu_problems(each, matching)
        elif each.node_class.shaped:
            found.append(_shape_problem(each))
        else:
            found.append(_label_problem(f"{each.key}.labels", each.labels, rooms))
    if not found:
        try:
            bundles(swarm, rooms)
        except ValueError:
            cores = sum(room.cpus for room in rooms)
            allowed = (
                f"a swarm that fits on the nodes all at once: they have {cores:g} cores in all"
            )
            if not cores:
                allowed += ", and no autoscaler adds nodes"
            found.append(Problem("swarm.peers", swarm.peers, allowed))
    return found


def lasting_problems(swarm: SwarmConfig) -> list[Problem]:
    """Return the demands of a swarm that no added node can meet either."""
    found: list[Problem] = []
    for each in _classes(swarm):
        found += _share_problems(each)
        if each.node_class.shaped:
            found.append(_shape_problem(each))
    return found


def _share_problems(each: _Class) -> list[Problem]:
    if each.node_class.gpus <= 1 or each.node_class.gpus == int(each.node_class.gpus):
        return []
    return [
        Problem(each.gpu_key, each.node_class.gpus, "a fraction below 1, or a whole number of GPUs")
    ]


def _shape_problem(each: _Class) -> Problem:
    item = each.node_class
    return Problem(
        f"{each.key}.link" if item.link is not None else f"{each.key}.cpu_share",
        item.link.model_dump() if item.link is not None else item.cpu_share,
        "absent, or the shape of a testbed's nodes of this class: no node of this cluster has "
        "this shape, and an unshaped row must not pass for a shaped one",
    )


def gpu_problems(swarm: SwarmConfig, rooms: Sequence[Room]) -> Iterator[Problem]:
    """Find demands for GPUs that these nodes cannot meet, whatever the labels."""
    for each in _classes(swarm):
        yield from _gpu_problems(each, rooms)


def _gpu_problems(each: _Class, rooms: Sequence[Room]) -> list[Problem]:
    wrong = _share_problems(each)
    if wrong or each.node_class.gpus == 0:
        return wrong
    peers = each.node_class.count
    room_for = sum(_Devices(room.gpus).peers(each.node_class.gpus) for room in rooms)
    if room_for >= peers:
        return []
    total = sum(room.gpus for room in rooms)
    text = (
        f"a demand that can be met for {peers} peers: the nodes have {total:g} GPUs in all, "
        f"room for {room_for} such peers (a share is one of a single GPU)"
    )
    return [Problem(each.gpu_key, each.node_class.gpus, text)]


def _label_problem(key: str, labels: dict[str, str], rooms: Sequence[Room]) -> Problem:
    carried = sorted({f"{k}={v}" for room in rooms for k, v in room.labels.items()})
    asked = [f"{k}={v}" for k, v in labels.items()]
    missing = next((label for label in asked if label not in carried), asked[0])
    return Problem(
        key,
        labels,
        f"labels that one node has together; the nodes have {', '.join(carried) or 'none'}",
        nearest(missing, carried),
    )
