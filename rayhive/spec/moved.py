"""Settings of a swarm that became axes: studies and specs of earlier versions are still read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

#: Fields of ``swarm`` in version 0.1 that are axes now.
MOVED = ("average_state_every", "state_codec")
#: Local steps in place of ``use_local_updates``.
LOCAL_UPDATES: dict[str, Any] = {"local_steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}


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
    texts = [f"swarm.{name} is now space.{name}" for name in moved]
    if moved:
        found["swarm"] = {name: value for name, value in swarm.items() if name not in moved}
        _rewrite(found, lambda given: {**moved, **given})
    local = swarm.get("use_local_updates")
    if local is False or (local is True and "local_steps" not in axes):
        found["swarm"] = {k: v for k, v in found["swarm"].items() if k != "use_local_updates"}
        if local:
            keys = ", ".join(f"space.{name}: {value}" for name, value in LOCAL_UPDATES.items())
            texts.append(f"swarm.use_local_updates is now {keys}")
            _rewrite(found, _as_local_steps)
    for text in texts if warn else ():
        warnings.warn(text, FutureWarning, stacklevel=3)
    return found


def _rewrite(found: dict[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Change the space of a study, and its enqueued configurations."""
    found["space"] = change(found.get("space", {}))
    queued = found.get("enqueue", ())
    if isinstance(queued, (list, tuple)):
        found["enqueue"] = [
            change(entry) if isinstance(entry, Mapping) else entry for entry in queued
        ]


def _as_local_steps(axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return axes of local steps that do what local updates with ``axes`` did.

    A round was due as often as parameters were averaged, with their codec, and in the background
    if that was delayed.
    """
    found = {**LOCAL_UPDATES, **axes}
    for old, new, other in (
        ("average_state_every", "local_steps", {"auto": 1}),
        ("state_codec", "codec", {}),
        ("delay", "delay", {"state": "gradients"}),
    ):
        if old in axes:
            value = found.pop(old)
            several = isinstance(value, (list, tuple))
            values = [_mapped(each, other) for each in (value if several else [value])]
            found[new] = values if several else values[0]
    return found


def _mapped(value: Any, other: Mapping[str, Any]) -> Any:
    return other.get(value, value) if isinstance(value, str) else value


def moved_to_configuration(data: Any) -> Any:
    """Return the data of a spec whose axes stand in ``configuration``.

    A recorded replicate with local updates is not read any more: its rounds had no gradients.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("swarm"), Mapping):
        return data
    swarm, configuration = data["swarm"], data.get("configuration")
    moved = {name: swarm[name] for name in MOVED if name in swarm}
    gone = {"use_local_updates"} if swarm.get("use_local_updates") is False else set()
    if not (moved or gone) or not isinstance(configuration, Mapping):
        return data
    left = {name: value for name, value in swarm.items() if name not in moved.keys() | gone}
    return {**data, "swarm": left, "configuration": {**moved, **configuration}}
