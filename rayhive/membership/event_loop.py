"""Event loops: a thread with one of its own, and the wake-up of coroutines by changes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable


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


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    """Return when the event is set, or after a time.

    Args:
        event: The event.
        seconds: Longest wait [s]; None for no limit.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        # unlike wait_for, this never swallows a cancellation
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()


class LoopThread:
    """Runs one coroutine on an event loop of its own.

    Args:
        main: The coroutine; it has to return once the event that it gets is set.
        name: Name of the thread.

    Attributes:
        error: The error with which the coroutine ended; None if there was none.
        ended: Set when the thread has ended.
    """

    def __init__(self, main: Callable[[asyncio.Event], Awaitable[None]], name: str) -> None:
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._main, self._ready = main, threading.Event()
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread.is_alive()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until the event loop runs, for at most ``timeout`` seconds."""
        self._ready.wait(timeout)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function on the event loop; do nothing before it runs, or after it has ended."""
        if self._ready.is_set():
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(function)

    def stop(self, timeout: float | None = None) -> None:
        """Let the coroutine return, and wait for it."""
        self.wait_until_ready(timeout)
        self.call_soon(lambda: self._stop.set())
        self.ended.wait(timeout)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self.error = error
        finally:
            self.ended.set()

    async def _serve(self) -> None:
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        self._ready.set()
        await self._main(self._stop)
