"""Peer actors that wait for the next replicate of their supervisor.

The start of an actor takes half a second of a core. A supervisor owns its idle actors, as it owns
those of a running replicate: they end with it, whatever ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

#: Longest wait for the answer of an idle actor [s].
_ANSWER_S = 3.0


class PeerPool:
    """The idle actors of one supervisor: those of the replicate before."""

    def __init__(self) -> None:
        self._idle: list[tuple[str, Any]] = []

    async def take(self, node: str, opened: Callable[[Any], Any]) -> Any | None:
        """Return an actor on a node that answers; None without one.

        Args:
            node: Ray's id of the node.
            opened: Makes the call that prepares an actor for its next peer.
        """
        for entry in [entry for entry in self._idle if entry[0] == node]:
            if entry not in self._idle:  # taken for another peer meanwhile
                continue
            self._idle.remove(entry)
            actor = entry[1]
            try:
                await asyncio.wait_for(opened(actor), _ANSWER_S)
            except (RayError, asyncio.TimeoutError):
                ray.kill(actor)
            else:
                return actor
        return None

    def give(self, node: str, actor: Any) -> None:
        """Keep an actor on a node, whose peer has ended."""
        self._idle.append((node, actor))

    async def close(self) -> None:
        """End all idle actors."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(end(actor) for _, actor in idle))


async def end(actor: Any) -> None:
    """End an actor without a peer, or one that does not answer."""
    with contextlib.suppress(RayError, asyncio.TimeoutError):
        await asyncio.wait_for(actor.leave.remote(), _ANSWER_S)
    ray.kill(actor)
