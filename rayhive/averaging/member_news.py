"""News of the members of a run, on their way from the trainer to an averager's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ParamSpec

from rayhive.averaging.step_requests import Pipe, Step
from rayhive.membership.view import Member

P = ParamSpec("P")
#: The members, oldest first, and the ids of lost peers.
News = tuple[tuple[Member, ...], frozenset[bytes]]


class MemberNews:
    """Tells an averager's process which peers are members, and how far they are.

    Only a search for a group reads how far the members are, and every message wakes the averager's
    process. Progress between two steps therefore waits for the next step. Peers that come, leave or
    are lost are told at once. The methods may be called from any thread.

    Args:
        pipe: Pipe to the averager's process.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._lock = pipe, threading.Lock()
        self._newest: News | None = None
        self._told: News | None = None
        self._steps: list[Step] = []

    def set(self, members: tuple[Member, ...], lost: frozenset[bytes]) -> None:
        """Set the members, oldest first, and the ids of lost peers.

        Raises:
            OSError: The process has ended.
        """
        with self._lock:
            self._newest = members, lost
            if self._running() or _peers(self._newest) != _peers(self._told):
                self._tell()

    def begin(self, request: Callable[P, Step], *args: P.args, **kwargs: P.kwargs) -> Step:
        """Request a step of an averager that knows the newest members, and return the step.

        Args:
            request: Requests the step.
            args: Passed to ``request``.
            kwargs: Passed to ``request``.

        Raises:
            OSError: The process has ended.
        """
        with self._lock:
            if self._newest is not self._told:
                self._tell()
            step = request(*args, **kwargs)
            self._steps = [*self._running(), step]
            return step

    def _running(self) -> list[Step]:
        return [step for step in self._steps if not step.done()]

    def _tell(self) -> None:
        assert self._newest is not None
        self._pipe.send(("_set_members", [*self._newest], {}))
        self._told = self._newest


def _peers(news: News | None) -> tuple[set[bytes], frozenset[bytes]] | None:
    return None if news is None else ({member.peer_id for member in news[0]}, news[1])
