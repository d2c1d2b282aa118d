"""Breaks between batches, after which a peer steps out of the swarm's rounds.

A break is a validation, a checkpoint, a slow loader or a callback. Only its length counts: the
trainer reports when a batch begins and when it is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

#: How long a peer may be between two batches before it steps out of the swarm's rounds [s].
BREAK_S = 0.5
#: Between two looks [s].
LOOK_S = 0.1


class Breaks:
    """Watches the time between batches; its owner holds a lock around every call.

    Args:
        clock: Monotonic time [s].
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None

    def begin(self) -> None:
        """Note that no batch is computed from now on."""
        if self._since is None:
            self._since = self._clock()

    def end(self) -> float:
        """Note that a batch begins; return how long there was none [s]."""
        since, self._since = self._since, None
        return 0.0 if since is None else self._clock() - since

    @property
    def is_long(self) -> bool:
        """Whether the others should not wait any more."""
        return self._since is not None and self._clock() - self._since > BREAK_S


async def watch(look: Callable[[], None]) -> None:
    """Call a function for as long as this task runs, often enough to notice a break."""
    while True:
        await asyncio.sleep(LOOK_S)
        look()
