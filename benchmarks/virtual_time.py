"""Event loop whose clock jumps to the next event, so that minutes pass in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: time passes by jumping."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("all tasks wait and no event is due")
        self.loop.pass_time(timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop with virtual time.

    Attributes:
        now: The present time [s].
    """

    def __init__(self) -> None:
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.loop, self.now = self, 0.0

    def time(self) -> float:
        """Return the present time [s]."""
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Jump ahead, and on to the next timer if the loop would run it early.

        A loop runs timers before their time by up to the resolution of its clock. A real clock goes
        on, so that a coroutine that waits again for the same moment does so a few times at most.
        """
        self.now += max(0.0, seconds)
        next_timer: float = self._scheduled[0].when() if self._scheduled else self.now
        if self.now < next_timer < self.now + self._clock_resolution:
            self.now = next_timer

    def run(self, body: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and return its result."""
        return self.run_until_complete(body)

    def end(self) -> None:
        """Cancel all tasks and close the loop."""
        left = asyncio.all_tasks(self)
        for task in left:
            task.cancel()
        if left:
            self.run_until_complete(asyncio.wait(left))
        self.close()
