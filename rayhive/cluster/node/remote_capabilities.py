"""Capabilities of the nodes of a running cluster; every node is asked."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayhive.cluster.node import capabilities
from rayhive.cluster.replicate.placement import Room, demands
from rayhive.faults.target import CAPABILITIES
from rayhive.spec import SwarmConfig

#: Time limit for the answer of a node, on which Ray first starts a process [s].
PATIENCE_S = 60.0


def hosts(swarm: SwarmConfig, rooms: Sequence[Room]) -> list[Room]:
    """Return the nodes that may host peers of the swarm."""
    wanted = demands(swarm)
    return [
        room
        for room in rooms
        if room.cpus and any(room.carries(b.labels) and room.gpus >= b.gpus for b in wanted)
    ]


def what_all_can(rooms: Sequence[Room]) -> dict[str, str | None]:
    """Return None for each capability, or the reason why a node lacks it.

    A node that does not answer lacks all capabilities.
    """
    probe = ray.remote(num_cpus=0, max_retries=0)(_here)
    refs = {
        probe.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(room.node, soft=False)
        ).remote(): room.node
        for room in rooms
    }
    ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=PATIENCE_S)
    found = [dict.fromkeys(CAPABILITIES, f"node {refs[r][:8]} does not answer") for r in late]
    for ref in ready:
        try:
            found.append(ray.get(ref))
        except RayError as error:
            reason = f"node {refs[ref][:8]}: {str(error).strip().splitlines()[-1]}"
            found.append(dict.fromkeys(CAPABILITIES, reason))
    return capabilities.everywhere(found)


def _here() -> dict[str, str | None]:
    """Return the capabilities of this node, with its name in the reasons."""
    name = socket.gethostname()
    return {
        key: reason if reason is None else f"on {name}: {reason}"
        for key, reason in capabilities.here().items()
    }
