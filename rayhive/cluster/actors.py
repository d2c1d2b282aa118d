"""Names of rayhive's actors on a Ray cluster, and their end."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import re
import sys
from pathlib import Path

import ray
from ray.actor import exit_actor

NAMESPACE = "rayhive"
_AGENT = "agent"


def supervisor_pattern(study: str | None) -> re.Pattern[str]:
    """Return what the names of a study's supervisors look like; of any study's for None."""
    name = ".+" if study is None else re.escape(study.replace(".", "_"))
    return re.compile(rf"{name}-t\d+-r\d+-.+-a\d+")


def agent_prefix(study: str) -> str:
    """Return what the names of a study's agents begin with."""
    return f"{_AGENT}:{study}:"


def agent_name(study: str, node: str) -> str:
    """Return the name of the agent of this study, this code and this node."""
    return f"{agent_prefix(study)}{code_version()}:{node[:16]}"


def is_agent(name: str) -> bool:
    """Return whether an actor of this name is an agent."""
    return name.startswith(f"{_AGENT}:")


def code_version() -> str:
    """Return a short name of the code that this process would import.

    A forkserver has imported a study's code for good, so a study that goes on with other code must
    not meet the old forkserver. What can differ is what Ray ships (named by content), where rayhive
    is imported from, and its files if that is a checkout.
    """
    package = Path(__file__).resolve().parent.parent
    newest = max(file.stat().st_mtime_ns for file in package.rglob("*.py"))
    environment = ray.get_runtime_context().runtime_env
    shipped = {key: environment.get(key) for key in ("working_dir", "py_modules", "pip", "conda")}
    text = json.dumps([sys.executable, str(package), newest, shipped], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def live(prefix_or_pattern: str | re.Pattern[str]) -> list[str]:
    """Return the names of rayhive's living actors that begin so, or match in full."""
    names = [
        str(entry["name"])
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE
    ]
    if isinstance(prefix_or_pattern, str):
        return sorted(name for name in names if name.startswith(prefix_or_pattern))
    return sorted(
        name for name in names if prefix_or_pattern.fullmatch(name) and not is_agent(name)
    )


def pending(name: str) -> bool:
    """Return whether Ray knows an actor of this name and has not made it yet."""
    try:
        actor = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    # There is no public call for the state of an actor without Ray's dashboard.
    state = importlib.import_module("ray._private.state").state
    found = state.actor_table(actor._actor_id.hex())
    return found.get("State") in ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


def end(name: str) -> None:
    """Kill an actor by its name, if there is one."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def leave() -> None:
    """End the actor that this is called in, after what else it is doing."""
    # Ray ends a process on the spot, before what is registered to run at exit, if one of its
    # references is collected after it was shut down.
    gc.collect()
    gc.freeze()
    exit_actor()  # type: ignore[no-untyped-call]
