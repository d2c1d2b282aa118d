"""Waits for a state that may change with every event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class StopRequested(Exception):
    """The replicate was asked to end.

    Args:
        reason: Reason of the request.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


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

    async def until(self, condition: Callable[[], object], deadline: float) -> bool:
        """Return whether a condition came true in time.

        Args:
            condition: The condition.
            deadline: Latest time [s of the monotonic clock].
        """
        while not condition():
            self._changed.clear()
            left = deadline - time.monotonic()
            if left <= 0:
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
        while not task.done():
            if self.stopped is not None:
                task.cancel()
                raise StopRequested(self.stopped)
            change = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({task, change}, return_when=asyncio.FIRST_COMPLETED)
            change.cancel()
            self._changed.clear()
        task.result()
