"""Calls of actors over connections that break for a while.

``ActorUnavailableError`` is not a death: the call may or may not have arrived, and the actor may
answer the next one. So a call is repeated, and an actor does a repeated call once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from ray.exceptions import ActorUnavailableError, RayActorError

#: Seconds between two tries: nothing announces that an actor can be reached again.
RETRY_EVERY = 0.5
#: Results that an actor remembers; repeated calls follow each other within a minute.
_REMEMBERED = 256

T = TypeVar("T")


async def repeated(call: Callable[[], Awaitable[T]], patience: float) -> T:
    """Await a call, and make it again while its actor is unavailable.

    Args:
        call: Makes the call; it has to be one that can arrive twice.
        patience: Seconds after which an unavailable actor is given up.

    Raises:
        ActorUnavailableError: The actor was unavailable for that long.
        RayActorError: It is dead.
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
    """Calls with a key, each of which is done once however often it arrives."""

    def __init__(self) -> None:
        self._results: dict[str, asyncio.Future[Any]] = {}

    async def do(self, key: str, step: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the first call with this key.

        Args:
            key: Unique among the calls of this actor.
            step: What the call does.
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
        patience: How long one may take [s].
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
