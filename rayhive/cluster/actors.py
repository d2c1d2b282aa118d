"""Names, lookup and end of rayhive's actors on a Ray cluster."""

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
    """Return the pattern of the names of a study's supervisors; of any study for None."""
    name = ".+" if study is None else re.escape(study.replace(".", "_"))
    return re.compile(rf"{name}-t\d+-r\d+-.+-a\d+")


def agent_prefix(study: str) -> str:
    """Return the common prefix of the names of a study's agents."""
    return f"{_AGENT}:{study}:"


def agent_name(study: str, node: str) -> str:
    """Return the name of the agent of this study, this code and this node."""
    return f"{agent_prefix(study)}{code_version()}:{node[:16]}"


def is_agent(name: str) -> bool:
    """Return whether an actor of this name is an agent."""
    return name.startswith(f"{_AGENT}:")


def code_version() -> str:
    """Return a short hash of the code that this process would import.

    A forkserver imports a study's code once, so a study that is resumed with other code must not
    use the old forkserver. The hash covers the packages that Ray ships (named by content), the
    folder that rayhive is imported from, and the age of its files, which matters for a checkout.
    """
    package = Path(__file__).resolve().parent.parent
    newest = max(file.stat().st_mtime_ns for file in package.rglob("*.py"))
    environment = ray.get_runtime_context().runtime_env
    shipped = {key: environment.get(key) for key in ("working_dir", "py_modules", "pip", "conda")}
    text = json.dumps([sys.executable, str(package), newest, shipped], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def live(prefix_or_pattern: str | re.Pattern[str]) -> list[str]:
    """Return the names of rayhive's living actors by prefix, or by a pattern of the whole name."""
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
    """Return whether Ray knows an actor of this name and has not created it yet."""
    try:
        actor = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    # Without Ray's dashboard there is no public call for the state of an actor.
    state = importlib.import_module("ray._private.state").state
    found = state.actor_table(actor._actor_id.hex())
    return found.get("State") in ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


def end(name: str) -> None:
    """Kill an actor by its name, if there is one."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def leave() -> None:
    """End the calling actor after its running calls."""
    # If one of Ray's references is collected after the shutdown, Ray ends the process at once,
    # without the functions that are registered to run at exit.
    gc.collect()
    gc.freeze()
    exit_actor()  # type: ignore[no-untyped-call]
