"""Breaks between batches, after which a peer steps out of the swarm's rounds.

A break is a validation, a checkpoint, a slow loader or a callback. Only its length counts: the
trainer reports the start and the end of each batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: Longest time between two batches before a peer steps out of the swarm's rounds [s].
BREAK_S = 0.5
#: Interval between two checks for a break [s].
CHECK_S = 0.1


class Breaks:
    """Measures the time between batches. Its owner holds a lock around every call.

    Args:
        clock: Monotonic time [s].
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        """Note the end of a batch. During a break it does nothing."""
        if self._since is None:
            self._since = self._clock()

    def end(self) -> float:
        """Note the start of a batch; return the length of the break before it [s]."""
        since, self._since = self._since, None
        return 0.0 if since is None else self._clock() - since

    @property
    def is_long(self) -> bool:
        """Whether the present break is so long that no round should wait for its end."""
        return self._since is not None and self._clock() - self._since > BREAK_S


async def call_often(check: Callable[[], None]) -> None:
    """Call a function every :data:`CHECK_S` seconds until this task is cancelled."""
    while True:
        await asyncio.sleep(CHECK_S)
        check()
