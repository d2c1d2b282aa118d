"""Waiting for conditions of a replicate, with a request to end it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class StopRequested(Exception):
    """The replicate was asked to end, for the reason in the message."""


class Waiter:
    """Waits for conditions that are checked after every change.

    Attributes:
        stopped: Reason of a request to end the replicate; None without a request.
    """

    def __init__(self) -> None:
        self.stopped: str | None = None
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Have the conditions checked again."""
        self._changed.set()

    def stop(self, reason: str) -> None:
        """Record a request to end the replicate; the first reason is kept."""
        if self.stopped is None:
            self.stopped = reason
            self.changed()

    async def until(self, condition: Callable[[], object], deadline: float | None = None) -> bool:
        """Return whether a condition came true in time.

        Args:
            condition: The condition.
            deadline: Latest time [s of the monotonic clock]; None for no limit.
        """
        while not condition():
            self._changed.clear()
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except asyncio.TimeoutError:
                return bool(condition())
        return True

    async def unless_stopped(self, step: Awaitable[None]) -> None:
        """Await ``step``; cancel it if the replicate is asked to end.

        Raises:
            StopRequested: The replicate was asked to end.
        """
        task = asyncio.ensure_future(step)
        task.add_done_callback(lambda _: self.changed())
        await self.until(lambda: task.done() or self.stopped is not None)
        if not task.done():
            task.cancel()
            raise StopRequested(str(self.stopped))
        task.result()
