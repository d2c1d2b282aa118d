"""Detection of an autoscaler from its reports to Ray.

The head of every cluster runs a monitor. Without an autoscaler it reports the present nodes, each
with an invented type ``node_ID``. An autoscaler reports the node types of its configuration.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray

log = logging.getLogger("rayhive.cluster")

_STATUS_KEY = b"__autoscaling_status"
#: Type that the monitor invents for a node.
_INVENTED = re.compile(r"node_[0-9a-f]{28,}")
_POLL = 0.5


def grows(patience: float = 0.0) -> bool:
    """Return whether the connected cluster adds nodes on demand.

    Args:
        patience: Longest wait for the first report of a cluster that has just started [s].
    """
    deadline = time.monotonic() + patience
    while True:
        reports = [report for report in (_asked(ask) for ask in _SOURCES) if report is not None]
        if any(reports):
            return True
        if reports or time.monotonic() >= deadline:
            return False
        time.sleep(_POLL)


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
