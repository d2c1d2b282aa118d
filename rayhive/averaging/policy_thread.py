"""Thread in which a payload policy computes, beside the event loop that serves the network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

#: Elements on which a policy works for about a millisecond.
FEW = 1 << 20

Result = TypeVar("Result")


class PolicyThread:
    """A single thread that runs each piece of work to its end, even when the caller is cancelled.

    A cancelled round therefore leaves nothing half done, and no work that still writes where the
    next attempt works.

    Args:
        name: Name of the thread.
        elements: Elements on which it works; None if the work waits for another process. Work on
            few elements is done at once: two changes of the thread take about as long, and longer
            where all processors are in use.
    """

    def __init__(self, name: str, elements: int | None) -> None:
        self._name, self._at_once = name, elements is not None and elements <= FEW
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[..., Result], *args: Any, final: bool = False) -> Result:
        """Run work and return its result.

        Args:
            work: A function.
            args: Its arguments.
            final: Whether the work commits a round: the round then succeeds although its caller
                was cancelled meanwhile.
        """
        if self._at_once:
            return work(*args)
        if self._executor is None:  # created on first use: threads do not survive the fork
            self._executor = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        job = asyncio.get_running_loop().run_in_executor(self._executor, partial(work, *args))
        cancelled = False
        while not job.done():
            try:
                await asyncio.wait({job})
            except asyncio.CancelledError:
                cancelled = True
        result = job.result()
        if cancelled and not final:
            raise asyncio.CancelledError
        return result
