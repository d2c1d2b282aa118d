"""Checks of a cluster: room for a swarm, and the capabilities that planned faults need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rayhive.cluster import autoscaling
from rayhive.cluster.node import capabilities, remote_capabilities
from rayhive.cluster.node.raylets import rooms
from rayhive.cluster.replicate import placement
from rayhive.cluster.testbed.config import NUMBER_LABEL
from rayhive.errors import Problem
from rayhive.spec import SwarmConfig

#: Longest wait for the first report of an autoscaler [s]; its monitor reports every 5 s.
_FIRST_REPORT = 12.0


def capacity() -> dict[str, Any]:
    """Return the totals of the living nodes: ``cpus``, ``gpus``, ``nodes``, ``labels``."""
    found = rooms()
    return {
        "cpus": sum(room.cpus for room in found),
        "gpus": sum(room.gpus for room in found),
        "nodes": len(found),
        "labels": [room.labels for room in found],
    }


def check_room(swarm: SwarmConfig, embedded: bool) -> list[Problem]:
    """Return the demands of a swarm that the connected cluster can never meet.

    On a cluster with an autoscaler, these are only the demands that no node can ever meet: the
    other ones have to reach Ray before a node is added for them.

    Args:
        swarm: The swarm.
        embedded: Whether the cluster is an embedded Ray, which never grows.
    """
    found = placement.problems(swarm, rooms())
    if found and not embedded and autoscaling.grows(_FIRST_REPORT):
        return placement.lasting_problems(swarm)
    return found


def check_kinds(
    needs: Mapping[str, Collection[str]], swarm: SwarmConfig, embedded: bool
) -> list[Problem]:
    """Return a problem for each kind of fault that a node for the swarm does not allow.

    Args:
        needs: Kind of fault -> the capabilities that it needs.
        swarm: The swarm.
        embedded: Whether the cluster is an embedded Ray, on this machine.
    """
    if not needs:
        return []  # the check of the capabilities starts processes and mounts
    present = rooms()
    if embedded:
        available = dict(capabilities.here())
    elif any(NUMBER_LABEL in room.labels for room in present):  # a testbed, on this machine
        available = {**capabilities.here(), **dict.fromkeys(("link", "node", "nodes", "drain"))}
    else:
        available = remote_capabilities.what_all_can(remote_capabilities.hosts(swarm, present))
        available |= dict.fromkeys(("link", "node"), capabilities.NEEDS_TESTBED)
    return capabilities.missing(needs, available)
