"""Outcomes of an averager's steps, kept in the trainer's process."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from hivemind.averaging.control import StepControl
from hivemind.utils import MPFuture

from rayhive.averaging.round_result import RoundResult

#: Most outcomes kept between two calls of :meth:`StepHistory.take`.
ROUNDS_KEPT = 64
#: Longest wait for an averager to accept a step [s].
NOTICE_S = 10.0


class StepHistory:
    """Steps that run, and outcomes of steps that ended, until they are taken.

    hivemind's state averager drops the results of its rounds; they are available from here.
    """

    def __init__(self) -> None:
        self._steps: deque[Any] = deque()
        self._outcomes: deque[RoundResult] = deque(maxlen=ROUNDS_KEPT)

    def start(self, step: StepControl, pipe: Any) -> None:
        """Send a step to the averager's process and follow it.

        Args:
            step: The step, a future of a :class:`RoundResult`.
            pipe: Pipe to the averager's process.

        Raises:
            TimeoutError: The averager does not accept the step.
        """
        attached: MPFuture[Any] = MPFuture()
        pipe.send(("_step", [], {"step": step, "future_for_init": attached}))
        step.attach(*attached.result(NOTICE_S))
        self.follow(step)

    def follow(self, step: Any) -> None:
        """Keep the outcome of a step that was started, once it ends."""
        self._collect()
        self._steps.append(step)

    def _collect(self) -> None:
        """Replace ended steps by their outcomes; each step holds memory that processes share."""
        for _ in range(len(self._steps)):
            step = self._steps.popleft()
            if not step.done():
                self._steps.append(step)
            elif not step.cancelled():  # a cancelled step never was a round
                error = step.exception()
                result = step.result() if error is None else RoundResult(error=repr(error))
                self._outcomes.append(result)

    def take(self) -> list[RoundResult]:
        """Return the rounds that ended since the last call, failed ones with their error."""
        self._collect()
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]


class LockedPipe:
    """The trainer's end of an averager's pipe, safe to send through from several threads."""

    def __init__(self, pipe: Any) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def send(self, message: Any) -> None:
        """Send one message."""
        with self._lock:
            self._pipe.send(message)
