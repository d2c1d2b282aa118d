"""Steps of an averager: their records, and their orderly end at shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field

from hivemind.averaging.control import StepControl
from hivemind.dht import DHT, DHTNode

from rayhive.averaging.preparation import Preparation

#: Longest waits at shutdown, for steps to end and for the DHT to have read all messages [s];
#: hivemind terminates an averager that takes longer than 5 s.
STEP_PATIENCE, FLUSH_PATIENCE = 0.7, 2.5


@dataclass
class StepTrace:
    """Record of one step of an averager; times are of ``time.monotonic``.

    Attributes:
        step: The step; None outside a step.
        searches: Begin and end of each search for a group.
        triggered: Time at which the trainer allowed the all-reduce.
        groups: Ids of the groups that were found.
        wasted_bytes: Payload sent in attempts that failed.
        excluded: Whether the outlier filter refused this peer's tensors.
        preparation: Work on the round during the last search.
        replaced: Largest share of the averaged tensors in which a failed attempt left averages.
    """

    step: StepControl | None = None
    searches: list[tuple[float, float]] = field(default_factory=list)
    triggered: float | None = None
    groups: list[bytes] = field(default_factory=list)
    wasted_bytes: int = 0
    excluded: bool = False
    preparation: Preparation | None = None
    replaced: float = 0.0

    def waited(self) -> float:
        """Return the seconds of searching after the trigger."""
        if self.triggered is None:
            return 0.0
        return sum(max(0.0, end - max(begin, self.triggered)) for begin, end in self.searches)


#: Record of the step that the current task belongs to: every step is a task of its own.
TRACE: ContextVar[StepTrace | None] = ContextVar("TRACE", default=None)


class RunningSteps:
    """Steps of one averager; each runs in a task of its own."""

    def __init__(self) -> None:
        self._steps: dict[asyncio.Task[None], StepControl] = {}

    @contextlib.contextmanager
    def running(self, step: StepControl) -> Iterator[StepTrace]:
        """Count the current task as the one that runs a step; yield the record of the step."""
        trace = StepTrace(step=step)
        TRACE.set(trace)  # for this task alone
        task = asyncio.current_task()
        assert task is not None
        self._steps[task] = step
        watcher = asyncio.create_task(_note_trigger(step, trace))
        try:
            yield trace
        finally:
            watcher.cancel()
            del self._steps[task]

    def cancel(self) -> None:
        """Cancel all steps, which ends their searches for a group.

        The trainer's side would pass the cancellation on, but nothing is read from its pipe during
        a shutdown. A search that goes on sends messages to the DHT until the process ends.
        """
        for step in self._steps.values():
            with contextlib.suppress(Exception):
                step.cancel()

    async def end(self) -> None:
        """Wait until all steps have ended; cancel tasks that take too long."""
        for insist in (False, True):
            tasks = set(self._steps)
            for task in tasks if insist else ():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=STEP_PATIENCE)


async def flush(dht: DHT) -> None:
    """Wait until the DHT's process has read all messages of this one, or for a while.

    Messages to the DHT refer to file descriptors of the sender. One that arrives after its sender
    is gone crashes the DHT, or makes it pause for longer than its own shutdown may take; its p2pd
    then outlives it.
    """
    with contextlib.suppress(Exception):
        read = dht.run_coroutine(do_nothing, return_future=True)
        await asyncio.wait_for(read, FLUSH_PATIENCE)


async def do_nothing(dht: DHT, node: DHTNode) -> None:
    """Do nothing in the DHT's process; runs after all messages that were sent before."""


async def _note_trigger(step: StepControl, trace: StepTrace) -> None:
    with contextlib.suppress(Exception):
        await step.wait_for_trigger()
        trace.triggered = time.monotonic()
