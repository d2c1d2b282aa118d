"""Settings of a swarm that became axes: studies and specs of earlier versions are still read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

#: Fields of ``swarm`` in version 0.1 that are axes now.
MOVED = ("average_state_every", "state_codec")


def moved_to_space(data: Mapping[str, Any], warn: bool = True) -> dict[str, Any]:
    """Return the data of a study whose axes stand in ``space`` and ``enqueue``.

    A moved setting held for all configurations of a study, enqueued ones included. One that the
    space gives as well is left where it is, and found as an unknown key.

    Args:
        data: Content of a study file.
        warn: Whether to name the new keys in warnings.
    """
    found, swarm, axes = dict(data), data.get("swarm"), data.get("space", {})
    if not isinstance(swarm, Mapping) or not isinstance(axes, Mapping):
        return found
    moved = {name: swarm[name] for name in MOVED if name in swarm and name not in axes}
    for name in moved if warn else ():
        warnings.warn(f"swarm.{name} is now space.{name}", FutureWarning, stacklevel=3)
    if moved:
        found["swarm"] = {name: value for name, value in swarm.items() if name not in moved}
        found["space"] = {**axes, **moved}
        queued = found.get("enqueue", ())
        if isinstance(queued, (list, tuple)):
            found["enqueue"] = [
                {**moved, **entry} if isinstance(entry, Mapping) else entry for entry in queued
            ]
    return found


def moved_to_configuration(data: Any) -> Any:
    """Return the data of a spec whose axes stand in ``configuration``."""
    if not isinstance(data, Mapping) or not isinstance(data.get("swarm"), Mapping):
        return data
    swarm, configuration = data["swarm"], data.get("configuration")
    moved = {name: swarm[name] for name in MOVED if name in swarm}
    if not moved or not isinstance(configuration, Mapping):
        return data
    left = {name: value for name, value in swarm.items() if name not in moved}
    return {**data, "swarm": left, "configuration": {**moved, **configuration}}
