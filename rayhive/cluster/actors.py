"""rayhive's actors on a Ray cluster: names, lookup, calls and end.

Connections may break for a while. ``ActorUnavailableError`` does not mean that the actor is dead:
the call may have arrived, and the actor may answer the next one. So a call is repeated, and an
actor performs a repeated call once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import importlib
import json
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.actor import exit_actor
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMESPACE = "rayhive"
_AGENT, _SUPERVISOR = "agent", "supervisor"
#: Time between two attempts [s]; there is no notification of a restored connection.
RETRY_EVERY = 0.5
#: Number of results that an actor keeps; a call is repeated within a minute.
_REMEMBERED = 256

T = TypeVar("T")


#: Pattern of the names of replicates, which their placement groups have.
RUN_IDS = re.compile(r"[^:]+-r\d+-.+-a\d+")


def supervisor_pattern(study: str | None) -> re.Pattern[str]:
    """Return the pattern of the names of a study's supervisors; of any study for None."""
    name = "[^:]+" if study is None else re.escape(study)
    return re.compile(rf"{_SUPERVISOR}:{name}:.+")


def supervisor_prefix(study: str, node: str) -> str:
    """Return how the names of the supervisors of this study, this code and this node begin."""
    return f"{_SUPERVISOR}:{study}:{code_version()}:{node[:16]}:"


def new_supervisor_name(prefix: str) -> str:
    """Return a name that no supervisor has had before.

    The agents of the nodes tell by the name whether the supervisor of a run still lives.
    """
    return prefix + secrets.token_hex(4)


def may_supervise(name: str, run_id: str) -> bool:
    """Return whether an actor of this name is a supervisor of the study that a replicate is of."""
    parts = name.split(":")
    return parts[0] == _SUPERVISOR and run_id.startswith(f"{parts[1].replace('.', '_')}-")


def agent_pattern(study: str) -> re.Pattern[str]:
    """Return the pattern of the names of a study's agents."""
    return re.compile(rf"{_AGENT}:{re.escape(study)}:.+")


def agent_name(study: str, node: str) -> str:
    """Return the name of the agent of this study, this code and this node."""
    return f"{_AGENT}:{study}:{code_version()}:{node[:16]}"


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


def live(pattern: re.Pattern[str]) -> list[str]:
    """Return the names of rayhive's living actors that match a pattern as a whole."""
    return sorted(
        str(entry["name"])
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == NAMESPACE and pattern.fullmatch(str(entry["name"]))
    )


def supervisors() -> list[Any]:
    """Return the living supervisors of all studies."""
    found = map(find, live(supervisor_pattern(None)))
    return [actor for actor in found if actor is not None]


def find(name: str) -> Any:
    """Return an actor by its name; None if there is none."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(name, namespace=NAMESPACE)


def pending(name: str) -> bool:
    """Return whether Ray knows an actor of this name and has not created it yet."""
    actor = find(name)
    if actor is None:
        return False
    # Without Ray's dashboard there is no public call for the state of an actor.
    state = importlib.import_module("ray._private.state").state
    found = state.actor_table(actor._actor_id.hex())
    return found.get("State") in ("DEPENDENCIES_UNREADY", "PENDING_CREATION")


def detached(actor: type, name: str, node: str, *args: Any) -> Any:
    """Create an actor that outlives its driver, or return the living one of the same name.

    Args:
        actor: Its class.
        name: Its name.
        node: Ray's id of its node.
        args: Arguments of the class.
    """
    return (
        ray.remote(actor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        .remote(*args)
    )


def end(name: str) -> None:
    """Kill an actor by its name, if there is one."""
    if (actor := find(name)) is not None:
        ray.kill(actor)


async def repeated(call: Callable[[], Awaitable[T]], patience: float) -> T:
    """Await a call, and repeat it while its actor is unavailable.

    Args:
        call: Makes the call, which may arrive twice.
        patience: Time after which an unavailable actor is given up [s].

    Raises:
        ActorUnavailableError: The actor was unavailable for that time.
        RayActorError: The actor is dead.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return await call()
        except ActorUnavailableError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(RETRY_EVERY)


class Once:
    """Calls with a key, each performed once no matter how often it arrives."""

    def __init__(self) -> None:
        self._results: dict[str, asyncio.Future[Any]] = {}

    async def do(self, key: str, step: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first call with this key.

        Args:
            key: Key of the call; a repetition has the same key.
            step: Performs the call.
        """
        if key not in self._results:
            self._results[key] = asyncio.ensure_future(step())
            while len(self._results) > _REMEMBERED:
                del self._results[next(iter(self._results))]
        found: T = await asyncio.shield(self._results[key])
        return found


async def silent(agents: Mapping[str, Any], patience: float) -> dict[str, str]:
    """Return the nodes whose agents are dead or do not answer in time, each with the reason.

    Args:
        agents: Agent of each node.
        patience: Longest wait for an answer [s].
    """

    async def ask(agent: Any) -> str | None:
        try:
            await asyncio.wait_for(repeated(agent.ping.remote, patience), patience)
        except asyncio.TimeoutError:
            return f"no answer within {patience:g} s"
        except RayActorError as error:
            return str(error).strip().splitlines()[0]
        return None

    found = await asyncio.gather(*(ask(agent) for agent in agents.values()))
    return {node: why for node, why in zip(agents, found, strict=True) if why is not None}


def leave() -> None:
    """End the calling actor after its running calls."""
    # If one of Ray's references is collected after the shutdown, Ray ends the process at once,
    # without the functions that are registered to run at exit.
    gc.collect()
    gc.freeze()
    exit_actor()  # type: ignore[no-untyped-call]
