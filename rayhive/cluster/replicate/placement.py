"""Where the peers of a swarm go: bundles, their sizes, and what can never be placed.

GPUs and labels are demands. Cores are not: a swarm of eight peers must run on a laptop with two
cores, only slower. So a peer asks for the cores that its threads use where there are enough, and
for the largest equal share that lets the whole swarm fit where there are not. A swarm that
needs all cores thus has the cluster to itself, and others wait. Where an autoscaler adds
nodes, cores are asked for in full: it adds none for a demand that the present ones meet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rayhive.cluster.node import machine
from rayhive.cluster.testbed.config import CLASS_LABEL, shape_labels
from rayhive.errors import Problem, nearest
from rayhive.spec import NodeClass, SwarmConfig

#: Ray counts resources in ten-thousandths.
GRAIN = 1e-4


@dataclass(frozen=True)
class Room:
    """What one node has in total.

    Attributes:
        node: Ray's id of the node.
        cpus: Its logical CPUs.
        gpus: Its GPUs.
        labels: Its labels.
    """

    node: str
    cpus: float
    gpus: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)

    def carries(self, labels: dict[str, str]) -> bool:
        """Return whether the node has all of ``labels``."""
        return all(self.labels.get(key) == value for key, value in labels.items())


@dataclass(frozen=True)
class Bundle:
    """What one peer asks for.

    Attributes:
        cpus: Logical CPUs.
        gpus: GPUs.
        labels: Labels that its node must carry.
    """

    cpus: float
    gpus: float
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def resources(self) -> dict[str, float]:
        """The bundle as Ray wants it."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def demands(swarm: SwarmConfig, later: int = 0) -> list[Bundle]:
    """Return what each peer would like to have, in the order of the peers.

    Node classes take the peers in the order in which they are written.

    Args:
        swarm: The peers that start together.
        later: Number of peers that join them later; they are as the last of those.
    """
    threads = float(swarm.threads_per_peer)
    if swarm.node_classes is None:
        return [Bundle(threads, swarm.gpus_per_peer)] * (swarm.peers + later)
    together = [
        Bundle(threads * item.cpu_share, item.gpus, _labels(name, item, swarm))
        for name, item in swarm.node_classes.items()
        for _ in range(item.count)
    ]
    return together + [together[-1]] * later


def _labels(name: str, item: NodeClass, swarm: SwarmConfig) -> dict[str, str]:
    """Return what a node for a peer of this class carries: a shaped one was made for the class."""
    if not item.shaped:
        return dict(item.labels)
    share = item.cpu_share * swarm.threads_per_peer if item.cpu_share != 1.0 else None
    return {**item.labels, CLASS_LABEL: name, **shape_labels(item.link, share)}


def bundles(
    swarm: SwarmConfig, rooms: Sequence[Room], later: int = 0, growing: bool = False
) -> list[Bundle]:
    """Return what each peer asks for on this cluster, with those that join later.

    Args:
        swarm: The peers that start together.
        rooms: The present nodes.
        later: Number of peers that join them later.
        growing: Whether nodes are added on demand.

    Raises:
        ValueError: Not even the smallest share fits; :func:`problems` says why.
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
    """Yield the scales at which one more peer fits on some node, from the largest down."""
    largest = max(bundle.cpus for bundle in wanted)
    found = {1.0}
    for room in rooms:
        for count in range(1, len(wanted) + 1):
            found.add(min(1.0, room.cpus / count / largest))
    yield from sorted((scale for scale in found if scale > 0), reverse=True)
    yield GRAIN / largest


def this_machine() -> Room:
    """Return what an embedded Ray would have here."""
    found = machine.facts()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = len(found["gpus"])
    if visible is not None:
        gpus = min(gpus, len([name for name in visible.split(",") if name.strip()]))
    return Room("this machine", float(found["cores"]), float(gpus))


class _Devices:
    """The GPUs of one node: a share is one of a single device, and a whole one is undivided."""

    def __init__(self, gpus: float) -> None:
        rest = gpus - int(gpus)
        self._free = [1.0] * int(gpus) + ([rest] if rest > GRAIN else [])

    def take(self, gpus: float) -> bool:
        """Take a share, from the fullest device that has it, or whole devices."""
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

    def slots(self, gpus: float) -> int:
        """Return how many peers with such a share the free devices hold."""
        if gpus < 1:
            return sum(int((free + GRAIN / 2) / gpus) for free in self._free)
        return int(sum(free + GRAIN / 2 >= 1 for free in self._free) // gpus)


def fits(asked: Sequence[Bundle], rooms: Sequence[Room]) -> bool:
    """Return whether all bundles fit at once, the most demanding placed first.

    First fit is not optimal, but peers of one class are equal and classes few.
    """
    cores = [room.cpus for room in rooms]
    devices = [_Devices(room.gpus) for room in rooms]
    order = sorted(asked, key=lambda b: (len(b.labels), b.gpus, b.cpus), reverse=True)
    for bundle in order:
        # GPU nodes are kept for those who need them.
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
    """Return what of the swarm these nodes can never hold, whatever else runs on them."""
    found: list[Problem] = []
    if swarm.node_classes is None:
        found += _gpu_problems("swarm.gpus_per_peer", swarm.gpus_per_peer, swarm.peers, rooms)
    else:
        for name, item in swarm.node_classes.items():
            key = f"swarm.node_classes.{name}"
            labels = _labels(name, item, swarm)
            matching = [room for room in rooms if room.carries(labels)]
            if not matching and item.shaped:
                found.append(_shape_problem(key, item))
            elif matching:
                found += _gpu_problems(f"{key}.gpus", item.gpus, item.count, matching)
            else:
                found.append(_label_problem(f"{key}.labels", item.labels, rooms))
    if not found:
        try:
            bundles(swarm, rooms)
        except ValueError:
            cores = sum(room.cpus for room in rooms)
            allowed = (
                f"a swarm that fits on the nodes all at once: they have {cores:g} cores in all"
            )
            if not cores:
                allowed += ", and no autoscaler adds others"
            found.append(Problem("swarm.peers", swarm.peers, allowed))
    return found


def lasting_problems(swarm: SwarmConfig) -> list[Problem]:
    """Return what of the swarm no node that may yet be added can hold."""
    found: list[Problem] = []
    if swarm.node_classes is None:
        found += _share_problems("swarm.gpus_per_peer", swarm.gpus_per_peer)
    for name, item in (swarm.node_classes or {}).items():
        key = f"swarm.node_classes.{name}"
        found += _share_problems(f"{key}.gpus", item.gpus)
        if item.shaped:
            found.append(_shape_problem(key, item))
    return found


def _share_problems(key: str, gpus: float) -> Iterator[Problem]:
    if gpus > 1 and gpus != int(gpus):
        yield Problem(key, gpus, "a fraction below 1, or a whole number of GPUs")


def _shape_problem(key: str, item: NodeClass) -> Problem:
    return Problem(
        f"{key}.link" if item.link is not None else f"{key}.cpu_share",
        item.link.model_dump() if item.link is not None else item.cpu_share,
        "absent, or what a testbed's nodes of this class are: no node here is "
        "shaped so, and an unshaped row must not pass for a shaped one",
    )


def gpu_problems(swarm: SwarmConfig, rooms: Sequence[Room]) -> Iterator[Problem]:
    """Find demands for GPUs that these nodes can't meet, wherever labels put the peers."""
    if swarm.node_classes is None:
        yield from _gpu_problems("swarm.gpus_per_peer", swarm.gpus_per_peer, swarm.peers, rooms)
        return
    for name, item in swarm.node_classes.items():
        key = f"swarm.node_classes.{name}.gpus"
        yield from _gpu_problems(key, item.gpus, item.count, rooms)


def _gpu_problems(key: str, gpus: float, peers: int, rooms: Sequence[Room]) -> Iterator[Problem]:
    if gpus == 0:
        return
    wrong = list(_share_problems(key, gpus))
    if wrong:
        yield from wrong
        return
    slots = sum(_Devices(room.gpus).slots(gpus) for room in rooms)
    if slots < peers:
        total = sum(room.gpus for room in rooms)
        yield Problem(
            key,
            gpus,
            f"a demand that {peers} peers can have: the nodes have {total:g} GPUs in all, "
            f"room for {slots} such peers (a share is one of a single GPU)",
        )


def _label_problem(key: str, labels: dict[str, str], rooms: Sequence[Room]) -> Problem:
    carried = sorted({f"{k}={v}" for room in rooms for k, v in room.labels.items()})
    asked = [f"{k}={v}" for k, v in labels.items()]
    missing = next((label for label in asked if label not in carried), asked[0])
    return Problem(
        key,
        labels,
        f"labels that one node carries together; there are {', '.join(carried) or 'none'}",
        nearest(missing, carried),
    )
