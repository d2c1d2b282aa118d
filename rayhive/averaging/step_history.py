"""An averager's steps as the trainer's process asks for them, and what became of them."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.utils import MPFuture, get_dht_time

from rayhive.averaging.round_result import RoundResult

#: Rounds kept for :meth:`RecordedSteps.take_rounds`, should nobody ask.
ROUNDS_KEPT = 64
#: Longest wait for an averager to take notice of a step [s].
NOTICE_S = 10.0


class OneAtATime:
    """The trainer's end of an averager's pipe, for several threads to send through."""

    def __init__(self, pipe: Any) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def send(self, message: Any) -> None:
        """Send one message."""
        with self._lock:
            self._pipe.send(message)


class RecordedSteps(DecentralizedAverager):
    """Keeps the outcome of every step in the trainer's process.

    hivemind's state averager drops the result of its rounds; from here they can be had. This
    class stands *after* the averager that it serves among the bases, where all its steps pass.
    """

    _steps: deque[StepControl]
    _outcomes: deque[RoundResult]

    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> Any:
        """Run a step as hivemind does, and remember how it ended.

        hivemind waits for ever for an averager that does not take notice of the step.

        Raises:
            ValueError: Asked to wait for a step that waits for a trigger.
            TimeoutError: The averager does not react.
        """
        if wait and require_trigger:
            raise ValueError("a step that requires a trigger cannot be waited for here")
        now = get_dht_time()
        window = self.matchmaking_kwargs["min_matchmaking_time"]
        control = StepControl(
            scheduled_time=now + window if scheduled_time is None else scheduled_time,
            deadline=float("inf") if timeout is None else now + timeout,
            allow_retries=allow_retries,
            weight=float(self.mode.name != "AUX") if weight is None else weight,
            data_for_gather=self.serializer.dumps(
                [self.bandwidth, self.mode.value, self.serializer.dumps(gather)]
            ),
        )
        attached: MPFuture[Any] = MPFuture()
        self._outer_pipe.send(("_step", [], {"step": control, "future_for_init": attached}))
        control.attach(*attached.result(NOTICE_S))
        if not require_trigger:
            control.allow_allreduce()
        self._note_rounds()
        self._steps.append(control)
        return control.result() if wait else control

    def _note_rounds(self) -> None:
        """Keep what came of the steps that ended; each holds memory that processes share."""
        for _ in range(len(self._steps)):
            control = self._steps.popleft()
            if not control.done():
                self._steps.append(control)
            elif not control.cancelled():  # a cancelled step never was a round
                error = control.exception()
                result = control.result() if error is None else RoundResult(error=repr(error))
                self._outcomes.append(result)

    def take_rounds(self) -> list[RoundResult]:
        """Return the rounds that ended since the last call, failed ones with their error."""
        self._note_rounds()
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]
