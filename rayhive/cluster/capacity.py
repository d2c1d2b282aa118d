"""Room for a swarm, growth on demand, and capabilities for faults of the connected cluster.

The head of every cluster runs a monitor. Without an autoscaler it reports the present nodes, each
with an invented type ``node_ID``. An autoscaler reports the node types of its configuration.
"""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayhive.cluster.node import capabilities
from rayhive.cluster.node.processes import wait_until
from rayhive.cluster.node.raylets import rooms
from rayhive.cluster.replicate import placement
from rayhive.cluster.replicate.claims import most_at_once
from rayhive.cluster.replicate.placement import Room, demands
from rayhive.cluster.testbed.config import NUMBER_LABEL
from rayhive.errors import Problem
from rayhive.faults.target import CAPABILITIES
from rayhive.spec import SwarmConfig

log = logging.getLogger("rayhive.cluster")

#: Longest wait for the first report of an autoscaler [s]; its monitor reports every 5 s.
_FIRST_REPORT = 12.0
#: Time limit for the answer of a node, on which Ray first starts a process [s].
_PATIENCE_S = 60.0
_STATUS_KEY = b"__autoscaling_status"
#: Type that the monitor invents for a node.
_INVENTED = re.compile(r"node_[0-9a-f]{28,}")
_POLL = 0.5


def check_room(swarm: SwarmConfig, embedded: bool) -> list[Problem]:
    """Return the demands of a swarm that the connected cluster can never meet.

    On a cluster with an autoscaler, these are only the demands that no node can ever meet: the
    other ones have to reach Ray before a node is added for them.

    Args:
        swarm: The swarm.
        embedded: Whether the cluster is an embedded Ray, which never grows.
    """
    found = placement.problems(swarm, rooms())
    if found and not embedded and grows(_FIRST_REPORT):
        return placement.lasting_problems(swarm)
    return found


def at_once(swarm: SwarmConfig, joining: int = 0) -> int:
    """Return how many replicates of a swarm the present nodes can run at the same time.

    Args:
        swarm: The peers that start together.
        joining: Most peers that join later.
    """
    return most_at_once(swarm, rooms(), joining)


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
        wanted = demands(swarm)
        available = _what_all_can(
            [
                room
                for room in present
                if room.cpus and any(room.carries(b.labels) and room.gpus >= b.gpus for b in wanted)
            ]
        )
        available |= dict.fromkeys(("link", "node"), capabilities.NEEDS_TESTBED)
    return capabilities.missing(needs, available)


def _what_all_can(rooms: Sequence[Room]) -> dict[str, str | None]:
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
    ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=_PATIENCE_S)
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


def grows(patience: float = 0.0) -> bool:
    """Return whether the connected cluster adds nodes on demand.

    Args:
        patience: Longest wait for the first report of a cluster that has just started [s].
    """
    reports: list[bool] = []

    def reported() -> bool:
        found = (_asked(ask) for ask in _SOURCES)
        reports[:] = [report for report in found if report is not None]
        return bool(reports)

    wait_until(reported, patience, every=_POLL)
    return any(reports)


def _asked(ask: Callable[[], bool | None]) -> bool | None:
    """Return the answer of a source; None if this version of Ray does not have the source."""
    try:
        return ask()
    except Exception as error:  # the sources are internals of Ray
        log.debug("%s: %r", ask.__name__, error)
        return None


def _any_configured(types: Iterable[object]) -> bool:
    """Return whether one of some node types is from the configuration of an autoscaler."""
    return any(isinstance(name, str) and name and not _INVENTED.fullmatch(name) for name in types)


def _configured() -> bool | None:
    """Query the configuration that managed services report."""
    from ray._private import state

    config = state.state.get_cluster_config()
    return None if config is None else bool(config.node_group_configs)


def _first_version() -> bool | None:
    """Query the report of the first version of the autoscaler, or of the monitor."""
    from ray.experimental import internal_kv

    raw = internal_kv._internal_kv_get(_STATUS_KEY)
    return None if not raw else first_version_grows(json.loads(raw))


def first_version_grows(status: Any) -> bool | None:
    """Return whether a report of the first version names an autoscaler; None if it is empty."""
    report = status.get("autoscaler_report")
    if not report:
        return None
    types = [
        *(report.get("node_type_mapping") or {}).values(),
        *(report.get("active_nodes") or {}),
        *(report.get("pending_launches") or {}),
        *(node[1] for node in report.get("pending_nodes") or ()),
    ]
    return _any_configured(types) if types else None


def _second_version() -> bool | None:
    """Query the report of the second version of the autoscaler."""
    from ray.autoscaler.v2.sdk import get_cluster_status

    return second_version_grows(get_cluster_status(ray.get_runtime_context().gcs_address))


def second_version_grows(status: Any) -> bool | None:
    """Return whether a report of the second version names an autoscaler; None without a report."""
    if str(status.stats.autoscaler_version or "0") == "0":
        return None
    nodes = [*status.active_nodes, *status.idle_nodes, *status.pending_nodes]
    launches = [*status.pending_launches, *status.failed_launches]
    return _any_configured(item.ray_node_type_name for item in (*nodes, *launches))


_SOURCES = (_configured, _first_version, _second_version)
