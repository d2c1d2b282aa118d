"""Work on a round that does not depend on its group, done while a step looks for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from hivemind.utils import get_logger

logger = get_logger(__name__)

#: Time in which the request to join a group leaves before the work begins [s].
REQUEST_S = 0.0005


class Preparation:
    """Work that begins a moment later, unless the group is there by then.

    Args:
        work: Starts the work.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(REQUEST_S, self._begin)

    def _begin(self) -> None:
        self._task = asyncio.create_task(self._work())

    def drop(self) -> None:
        """Do not begin the work any more."""
        self._timer.cancel()

    async def ended(self) -> None:
        """Wait for work that has begun; do not begin it any more."""
        self.drop()
        if self._task is not None:
            await asyncio.wait({self._task})
            if not self._task.cancelled() and (error := self._task.exception()) is not None:
                logger.debug(f"a round could not be prepared: {error!r}")
