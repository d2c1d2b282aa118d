"""The outcomes of an averager's steps, kept in the trainer's process."""

from __future__ import annotations

from collections import deque
from typing import Any

from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl

from rayhive.compression.rounds import RoundResult

#: Steps kept for :meth:`RecordedSteps.take_rounds`, should nobody ask.
STEPS_KEPT = 1024


class RecordedSteps(DecentralizedAverager):
    """Keeps the outcome of every step in the trainer's process.

    hivemind's state averager drops the result of its rounds; from here they can be had. This
    class stands *after* the averager that it serves among the bases, where all its steps pass.
    """

    _steps: deque[StepControl]

    def step(self, *args: Any, wait: bool = True, **kwargs: Any) -> Any:
        """Run a step as hivemind does, and remember how it ended.

        Raises:
            ValueError: Asked to wait for a step that waits for a trigger.
        """
        if wait and kwargs.get("require_trigger"):
            raise ValueError("a step that requires a trigger cannot be waited for here")
        control = super().step(*args, wait=False, **kwargs)
        self._steps.append(control)
        return control.result() if wait else control

    def take_rounds(self) -> list[RoundResult]:
        """Return the rounds that ended since the last call, failed ones with their error."""
        taken = []
        for _ in range(len(self._steps)):
            control = self._steps.popleft()
            if not control.done():
                self._steps.append(control)
            elif not control.cancelled():  # a cancelled step never was a round
                error = control.exception()
                taken.append(control.result() if error is None else RoundResult(error=repr(error)))
        return taken
