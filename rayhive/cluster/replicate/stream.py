"""The stream of a peer's items from its actor to the supervisor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from ray.exceptions import ActorUnavailableError, RayActorError

from rayhive.cluster.calls import RETRY_EVERY
from rayhive.cluster.replicate.peer_actor import Exited, StreamItem

_POLL_S = 20.0

#: Receives the name of a peer and one item of its stream, the last of type ``Exited``.
Listener: TypeAlias = Callable[[str, StreamItem], Awaitable[None]]


async def relay(name: str, actor: Any, listener: Listener, patience: float) -> None:
    """Pass the items of a peer on until its last one.

    Args:
        name: The peer.
        actor: Its actor.
        listener: Receives the items.
        patience: Time that the actor may be unavailable before it counts as lost [s].
    """
    taken, unavailable_since = 0, 0.0
    while True:
        try:
            items: list[StreamItem] = await actor.next_items.remote(taken, _POLL_S)
        except RayActorError as error:
            if isinstance(error, ActorUnavailableError):
                # The actor may come back; it keeps its items until their arrival is confirmed.
                unavailable_since = unavailable_since or time.monotonic()
                if time.monotonic() - unavailable_since < patience:
                    await asyncio.sleep(RETRY_EVERY)
                    continue
                reason = f"its actor could not be reached for {patience:g} s"
            else:
                reason = f"its actor died: {str(error).strip().splitlines()[0]}"
            await listener(name, Exited(reason=reason))
            return
        unavailable_since = 0.0
        taken += len(items)
        for item in items:
            await listener(name, item)
            if isinstance(item, Exited):
                return
