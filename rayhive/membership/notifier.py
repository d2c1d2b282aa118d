"""Wake-up of coroutines when something has changed."""

from __future__ import annotations

import asyncio
import contextlib


class Notifier:
    """Wakes every coroutine that waits for the next change.

    A change between a check and the wait must not be missed, so a coroutine takes
    :meth:`next_change` before it checks, and waits for that afterwards.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all coroutines that wait."""
        event, self._next = self._next, asyncio.Event()
        event.set()

    def next_change(self) -> asyncio.Event:
        """Return an event that the next change sets."""
        return self._next


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Return when the event is set, or after a time.

    Args:
        event: The event.
        seconds: Longest wait [s].
    """
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
