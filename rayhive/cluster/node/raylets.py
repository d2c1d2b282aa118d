"""Ray's nodes: list, drain, kill and start."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import ray

from rayhive.cluster.replicate.placement import Room
from rayhive.cluster.testbed.config import NUMBER_LABEL, TESTBED_VARIABLE
from rayhive.errors import ClusterError

_PREEMPTION = 2  # DRAIN_NODE_REASON_PREEMPTION of Ray's protocol
_ANSWER_S = 5.0


def nodes() -> list[Room]:
    """Return the cluster's nodes, dead nodes included."""
    return [
        Room(
            node=node["NodeID"],
            cpus=float(node["Resources"].get("CPU", 0.0)),
            gpus=float(node["Resources"].get("GPU", 0.0)),
            labels=dict(node.get("Labels") or {}),
            address=node["NodeManagerAddress"],
            alive=node["Alive"],
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
    ]


def rooms() -> list[Room]:
    """Return the cluster's living nodes."""
    return [room for room in nodes() if room.alive]


def free() -> dict[str, dict[str, float]]:
    """Return the free resources of each living node, by Ray's id; a moment old."""
    # no public call tells the nodes apart
    state = importlib.import_module("ray._private.state")
    found: dict[str, dict[str, float]] = state.available_resources_per_node()
    return found


def alive() -> list[str]:
    """Return the ids of the living nodes."""
    return [room.node for room in rooms()]


def missing() -> list[int]:
    """Return the numbers of this testbed's nodes that are not in the cluster."""
    folder = os.environ.get(TESTBED_VARIABLE)
    if folder is None:
        return []
    from rayhive.cluster.testbed.state import load

    there = {_number(room) for room in rooms()}
    return [node.index for node in load(folder).nodes if node.index not in there]


def drain(node: str, deadline_ms: int) -> None:
    """Announce to Ray that a node will be preempted.

    New actors avoid the node. Running actors stay.

    Args:
        node: Ray's id of the node.
        deadline_ms: Time of the preemption [ms, Unix time].

    Raises:
        ClusterError: Ray refuses.
    """
    accepted, reason = _gcs().drain_node(node, _PREEMPTION, "preempted by rayhive", deadline_ms)
    if not accepted:
        raise ClusterError(f"Ray does not drain node {node}: {reason}")


def draining() -> dict[str, float | None]:
    """Return the ids of the draining nodes, with the end of each [s, Unix time] or None.

    Raises:
        ClusterError: Ray does not answer.
    """
    try:
        found = _gcs().get_draining_nodes(timeout=_ANSWER_S)
    except Exception as error:  # the client raises errors of several kinds
        raise ClusterError(f"Ray does not tell which nodes drain: {error!r}") from error
    return {node: ms / 1000 if ms else None for node, ms in found.items()}


def _gcs() -> Any:
    return _client(ray.get_runtime_context().gcs_address)


@functools.lru_cache(maxsize=1)
def _client(address: str) -> Any:
    """Return a client of Ray's control service; not public, Ray's own autoscaler uses it."""
    module: Any = importlib.import_module("ray._raylet")
    return module.GcsClient(address=address)


def kill(node: str) -> None:
    """End a node of a testbed with everything on it.

    Args:
        node: Ray's id of the node.

    Raises:
        ClusterError: The node is not one of a testbed.
    """
    from rayhive.cluster.testbed import lifecycle

    lifecycle.kill_node(*_place(node))


def start(node: str) -> str:
    """Start a killed node of a testbed again.

    Args:
        node: Ray's last id of the node.

    Returns:
        Ray's new id of the node.

    Raises:
        ClusterError: The node is not one of a testbed, or does not start.
    """
    from rayhive.cluster.testbed import lifecycle

    folder, number = _place(node)
    lifecycle.start_node(folder, number)
    for room in rooms():
        if room.node != node and _number(room) == number:
            return room.node
    raise ClusterError(f"node {number} of the testbed was started but is not in the cluster")


def _place(node: str) -> tuple[str, int]:
    """Return the folder of this testbed, and the number of a node in it."""
    folder = os.environ.get(TESTBED_VARIABLE)
    number = next((_number(room) for room in nodes() if room.node == node), None)
    if folder is None or number is None:
        raise ClusterError("only a node of a testbed can be ended and started: rayhive testbed up")
    return folder, number


def _number(room: Room) -> int | None:
    """Return the number of a node in its testbed; None outside a testbed."""
    text = room.labels.get(NUMBER_LABEL)
    return None if text is None else int(text)
