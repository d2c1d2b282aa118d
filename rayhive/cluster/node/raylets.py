"""Ray's nodes: list, drain, kill and start."""

from __future__ import annotations

import importlib
import os
from typing import Any

import ray

from rayhive.cluster.replicate.placement import Room
from rayhive.cluster.testbed.config import NUMBER_LABEL, TESTBED_VARIABLE
from rayhive.errors import ClusterError

_PREEMPTION = 2  # DRAIN_NODE_REASON_PREEMPTION of Ray's protocol


def all_nodes() -> list[dict[str, Any]]:
    """Return Ray's records of its nodes, dead nodes included."""
    return list(ray.nodes())  # type: ignore[no-untyped-call]


def alive() -> list[str]:
    """Return the ids of the living nodes."""
    return [node["NodeID"] for node in all_nodes() if node["Alive"]]


def rooms() -> list[Room]:
    """Return the cluster's living nodes."""
    return [
        Room(
            node=node["NodeID"],
            cpus=float(node["Resources"].get("CPU", 0.0)),
            gpus=float(node["Resources"].get("GPU", 0.0)),
            labels=dict(node.get("Labels") or {}),
        )
        for node in all_nodes()
        if node["Alive"]
    ]


def missing() -> list[int]:
    """Return the numbers of this testbed's nodes that are not in the cluster."""
    folder = os.environ.get(TESTBED_VARIABLE)
    if folder is None:
        return []
    from rayhive.cluster.testbed.state import load

    there = {_number(node) for node in all_nodes() if node["Alive"]}
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
    # not public; Ray's own autoscaler uses this call
    gcs: Any = importlib.import_module("ray._raylet")
    client = gcs.GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, reason = client.drain_node(node, _PREEMPTION, "preempted by rayhive", deadline_ms)
    if not accepted:
        raise ClusterError(f"Ray does not drain node {node}: {reason}")


def kill(node: str) -> None:
    """End a node of a testbed with everything on it.

    Args:
        node: Ray's id of the node.

    Raises:
        ClusterError: The node is not one of a testbed.
    """
    from rayhive.cluster.testbed import nodes

    nodes.kill_node(*_place(node))


def start(node: str) -> str:
    """Start a killed node of a testbed again.

    Args:
        node: Ray's last id of the node.

    Returns:
        Ray's new id of the node.

    Raises:
        ClusterError: The node is not one of a testbed, or does not start.
    """
    from rayhive.cluster.testbed import nodes

    folder, number = _place(node)
    nodes.start_node(folder, number)
    for found in all_nodes():
        if found["Alive"] and found["NodeID"] != node and _number(found) == number:
            return str(found["NodeID"])
    raise ClusterError(f"node {number} of the testbed was started but is not in the cluster")


def _place(node: str) -> tuple[str, int]:
    """Return the folder of this testbed, and the number of a node in it."""
    folder = os.environ.get(TESTBED_VARIABLE)
    found = next((item for item in all_nodes() if item["NodeID"] == node), {})
    number = _number(found)
    if folder is None or number is None:
        raise ClusterError("only a node of a testbed can be ended and started: rayhive testbed up")
    return folder, number


def _number(node: dict[str, Any]) -> int | None:
    text = (node.get("Labels") or {}).get(NUMBER_LABEL)
    return None if text is None else int(text)
