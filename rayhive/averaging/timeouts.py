"""Timeouts of an averager that do not follow the matchmaking window."""

from __future__ import annotations

import asyncio
import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
)
from typing import Any, TypeVar

T = TypeVar("T")

#: Longest wait for a group member's next part [s], if no timeout is given.
SENDER_TIMEOUT = 10.0
#: Checks for progress in the longest time without any.
_CHECKS = 8


def hivemind_timeouts(
    window: float, allreduce_timeout: float | None, given: Mapping[str, Any]
) -> dict[str, float]:
    """Return the timeouts of hivemind's averager, with defaults that do not follow the window.

    Args:
        window: Matchmaking window [s].
        allreduce_timeout: Longest all-reduce [s].
        given: Arguments of the averager, of which the following have an effect [s]:
            ``request_timeout``: longest wait for a leader's answer; default 3. It is cut to half
            the window, because two peers that ask each other block until it ends.
            ``next_chunk_timeout``: longest wait for the next part of a state or a tensor. A value
            equal to the window counts as not given, because hivemind's optimizer passes the window
            by default. The default is a quarter of ``allreduce_timeout``, at most
            :data:`SENDER_TIMEOUT`, so that a round with a silent member ends before it is given up.
            ``sender_timeout``: longest wait of a reducer for a sender's next part; default
            ``next_chunk_timeout``.
            ``reducer_timeout``: longest wait for a reducer's answer; default twice the sender's.
    """
    chunk = given.get("next_chunk_timeout")
    if chunk is None or chunk == window:
        longest = math.inf if allreduce_timeout is None else allreduce_timeout / 4
        chunk = min(SENDER_TIMEOUT, longest)
    sender = chunk if given.get("sender_timeout") is None else given["sender_timeout"]
    reducer = given.get("reducer_timeout")
    return {
        "request_timeout": min(given.get("request_timeout", 3.0), 0.5 * window),
        "next_chunk_timeout": chunk,
        "sender_timeout": sender,
        "reducer_timeout": 2 * sender if reducer is None else reducer,
    }


async def while_it_moves(
    work: Coroutine[Any, Any, Any], moved: Callable[[], Any], patience: float | None
) -> None:
    """Wait for work as long as it makes progress.

    Args:
        work: The work.
        moved: Returns a value that differs after progress.
        patience: Longest time without progress [s]; None for no limit.

    Raises:
        asyncio.TimeoutError: The work made no progress, and was cancelled.
    """
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    pause = None if patience is None else patience / _CHECKS
    try:
        seen, since = moved(), loop.time()
        while not (await asyncio.wait({task}, timeout=pause))[0]:
            if moved() != seen:
                seen, since = moved(), loop.time()
            elif patience is not None and loop.time() - since >= patience:
                raise asyncio.TimeoutError(f"no progress for {patience:g} s")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    task.result()


async def in_time(stream: AsyncIterable[T], timeout: float | None) -> AsyncGenerator[T, None]:
    """Pass a stream on as long as each item comes in time.

    One timer serves the whole stream. ``asyncio.wait_for`` makes a task and a timer for each item,
    which cost more than a short item itself.

    Args:
        stream: The stream.
        timeout: Longest wait for an item [s]; None for no limit.

    Raises:
        asyncio.TimeoutError: An item did not come, and the wait for it was cancelled.
    """
    watch, items = _Watch(timeout), aiter(stream)
    try:
        while True:
            try:
                item = await watch.over(anext(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        watch.end()


async def within(timeout: float | None, wait: Awaitable[T]) -> T:
    """Await something for a limited time.

    ``asyncio.wait_for`` before Python 3.12 loses a cancellation that comes with the result.

    Args:
        timeout: Longest wait [s]; None for no limit.
        wait: What to await.

    Raises:
        asyncio.TimeoutError: It took longer, and was cancelled.
    """
    watch = _Watch(timeout)
    try:
        return await watch.over(wait)
    finally:
        watch.end()


class _Watch:
    """Cancels a wait that takes too long.

    Args:
        timeout: Longest wait [s]; None for no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        self._loop, self._timeout = asyncio.get_running_loop(), timeout
        self._task: asyncio.Task[Any] | None = None
        self._since, self._expired = 0.0, False
        self._timer: asyncio.TimerHandle | None = None

    async def over(self, wait: Awaitable[T]) -> T:
        """Await something, in the current task."""
        if self._timeout is None:
            return await wait
        self._task, self._since = asyncio.current_task(), self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout, self._look)
        try:
            return await wait
        except asyncio.CancelledError:
            if not self._expired or _is_cancelled_by_others(self._task):
                raise
            raise asyncio.TimeoutError(f"nothing came for {self._timeout:g} s") from None
        finally:
            self._task = None

    def _look(self) -> None:
        assert self._timeout is not None
        left = self._timeout
        if self._task is not None:
            left = self._since + self._timeout - self._loop.time()
            if left <= 0:
                self._expired = True
                self._task.cancel()
                return
        self._timer = self._loop.call_later(left, self._look)

    def end(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()


def _is_cancelled_by_others(task: asyncio.Task[Any] | None) -> bool:
    """Return whether a task that was cancelled once here was also cancelled elsewhere.

    Python 3.10 does not count cancellations: there the answer is always no.
    """
    uncancel = getattr(task, "uncancel", None)
    return uncancel is not None and uncancel() > 0
