"""Nodes of a running testbed: end, restart, measurement."""

from __future__ import annotations

from pathlib import Path

from rayhive.cluster.testbed import firewall, link_probe, namespaces, quota, raylets, state, veth
from rayhive.cluster.testbed.state import NodeState, TestbedState
from rayhive.errors import ClusterError, RayhiveError


def kill_node(folder: str | Path, index: int) -> list[int]:
    """Kill the raylet of a node and everything else on it. Works from any process.

    Args:
        folder: Folder of the testbed.
        index: Number of the node.

    Returns:
        The pids that were killed.
    """
    known = state.load(folder)
    node = known.node(index)
    killed = namespaces.kill(lambda: namespaces.processes([node.namespace]))
    for name in firewall.cuts(known.switch):
        if name.startswith(f"{index}-"):
            firewall.mend(known.switch, name)
    veth.Veth(known, node).cut_off()
    return killed


def start_node(folder: str | Path, index: int) -> None:
    """Start a node that was killed; return when Ray knows it. Works from any process.

    Args:
        folder: Folder of the testbed.
        index: Number of the node.

    Raises:
        ClusterError: The node runs, or does not start.
    """
    known = state.load(folder)
    node = known.node(index)
    if namespaces.processes([node.namespace]):
        raise ClusterError(f"node {index} of the testbed runs")
    group = raylets.group(known, node)
    if group is not None:
        quota.limit(group, None)
    veth.Veth(known, node).set(node.link)
    raylets.start_nodes(known, [node])
    limit_cpu(known, node)


def limit_cpu(known: TestbedState, node: NodeState) -> None:
    """Apply the CPU quota of a node. It follows the start, which a small quota would slow down."""
    group = raylets.group(known, node)
    if group is not None:
        quota.limit(group, node.cpu_share)


def alive(node: NodeState) -> bool:
    """Return whether a process runs on a node."""
    return bool(namespaces.processes([node.namespace]))


def measured(known: TestbedState) -> list[link_probe.Measured | None]:
    """Measure the links of all nodes in turn; None for a link that cannot be measured."""
    found: list[link_probe.Measured | None] = []
    for node in known.nodes:
        try:
            found.append(link_probe.measure_link(known, node, veth.Veth(known, node).now))
        except (OSError, RayhiveError):
            found.append(None)
    return found
