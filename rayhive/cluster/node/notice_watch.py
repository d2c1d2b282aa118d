"""Watch over the notice sources of one node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from rayhive.cluster.node.notices.base import NodeNotice, NoticeSource, SourceError
from rayhive.registry import NOTICE_SOURCES

log = logging.getLogger("rayhive.cluster")

#: Names of sources; ``auto`` for all that this node may have.
Sources: TypeAlias = Literal["auto"] | Sequence[str]
#: Longest pause after checks that failed [s].
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class FoundSource:
    """A notice source that this node may have.

    Attributes:
        name: Its name.
        answer: Its description of the node; empty if it does not answer.
        error: Why it does not answer; None if it does.
    """

    name: str
    answer: str
    error: str | None = None


async def found_sources() -> list[FoundSource]:
    """Ask each source that this node may have to identify itself."""
    found = []
    for name in _names("auto"):
        try:
            answer = await NOTICE_SOURCES.get(name)().identify()
            found.append(FoundSource(name, answer))
        except SourceError as error:
            found.append(FoundSource(name, "", str(error)))
    return found


def _names(sources: Sources) -> Sequence[str]:
    if sources != "auto":
        return sources
    return [name for name, source in NOTICE_SOURCES.items() if source.likely()]


class NoticeWatch:
    """Asks notice sources again and again, and keeps every notice.

    A notice is kept once: of several with the same source and words, the first counts.

    Args:
        pace: Factor of the pauses between checks.
    """

    def __init__(self, pace: float = 1.0) -> None:
        self._pace = pace
        self._notices: dict[tuple[str, str], tuple[NodeNotice, float]] = {}
        self._news = asyncio.Condition()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def add(self, sources: Sources) -> None:
        """Watch these sources, too.

        Raises:
            ConfigError: There is no source of this name.
        """
        for name in _names(sources):
            if name not in self._tasks:
                source: NoticeSource = NOTICE_SOURCES.get(name)()
                self._tasks[name] = asyncio.ensure_future(self._follow(name, source))

    async def notices(self, after: int, timeout: float) -> list[NodeNotice]:
        """Return the notices from number ``after`` on; wait for one if there is none yet.

        The time left is that at the moment of the answer. The list is empty after ``timeout``
        seconds.
        """
        async with self._news:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    self._news.wait_for(lambda: len(self._notices) > after), timeout
                )
            now = time.monotonic()
            return [
                notice
                if notice.left_s is None
                else replace(notice, left_s=max(0.0, notice.left_s - (now - seen)))
                for notice, seen in list(self._notices.values())[after:]
            ]

    async def close(self) -> None:
        """End the watch."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, name: str, source: NoticeSource) -> None:
        failures = 0
        while True:
            try:
                found = await source.check()
                failures = 0
            except SourceError as error:
                failures += 1
                if failures == 1:
                    log.warning("notice source %s: %s", name, error)
                found = []
            except Exception:  # of an answer that no documentation describes
                failures += 1
                log.exception("notice source %s", name)
                found = []
            seen = time.monotonic()
            async with self._news:
                for notice in found:
                    self._notices.setdefault((notice.source, notice.what), (notice, seen))
                self._news.notify_all()
            pause = source.every_s * 2 ** min(failures, 10)
            await asyncio.sleep(self._pace * min(pause, max(source.every_s, _LONGEST_PAUSE_S)))
