"""Calls of actors over connections that may break for a while.

``ActorUnavailableError`` does not mean that the actor is dead: the call may have arrived, and the
actor may answer the next one. So a call is repeated, and an actor performs a repeated call once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ray.exceptions import ActorUnavailableError, RayActorError

#: Time between two attempts [s]; there is no notification of a restored connection.
RETRY_EVERY = 0.5
#: Number of results that an actor keeps; a call is repeated within a minute.
_REMEMBERED = 256

T = TypeVar("T")


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
