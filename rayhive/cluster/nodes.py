"""Ray's nodes from outside: which live, and the end of one."""

from __future__ import annotations

import importlib
from typing import Any

import ray

from rayhive.errors import ClusterError

_PREEMPTION = 2  # DRAIN_NODE_REASON_PREEMPTION of Ray's protocol


def all_nodes() -> list[dict[str, Any]]:
    """Return what Ray knows of its nodes, dead ones included."""
    return list(ray.nodes())  # type: ignore[no-untyped-call]


def alive() -> list[str]:
    """Return the ids of the living nodes."""
    return [node["NodeID"] for node in all_nodes() if node["Alive"]]


def drain(node: str, deadline_ms: int) -> None:
    """Announce to Ray that a node will be taken by its cloud.

    New actors avoid it; those that run there go on.

    Args:
        node: Ray's id of the node.
        deadline_ms: When [ms, Unix time].

    Raises:
        ClusterError: Ray refuses.
    """
    # there is no public call; Ray's own autoscaler uses this one
    gcs: Any = importlib.import_module("ray._raylet")
    client = gcs.GcsClient(address=ray.get_runtime_context().gcs_address)
    accepted, reason = client.drain_node(node, _PREEMPTION, "preempted by rayhive", deadline_ms)
    if not accepted:
        raise ClusterError(f"Ray does not drain node {node}: {reason}")


def kill(node: str) -> None:
    """End a node of a testbed with everything on it."""
    raise ClusterError("only nodes of a testbed can be killed")


def start(node: str) -> str:
    """Start a killed node of a testbed again; return Ray's new id of it."""
    raise ClusterError("only nodes of a testbed can be started")
