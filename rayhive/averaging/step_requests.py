"""Steps on their way from the trainer to an averager's process, and signals about them.

hivemind sends three new futures for each step. Every one of them takes a connection and memory of
its own to the other process, which costs both processes several milliseconds. Here the averager's
process inherits the memory of all steps, and the pipe for their results; a step and its signals are
short messages.
"""

from __future__ import annotations

import itertools
import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, TimeoutError
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.utils import MPFuture

#: Longest wait for an averager to accept a step [s].
NOTICE_S = 10.0
#: Steps of an averager that can be in use at once.
STEPS = 256
#: Bytes of a step's control, as in hivemind, behind one byte for its state.
CONTROL = 18
_NOTHING = pickle.dumps(None)


class Pipe(Protocol):
    """Way to the averager's process."""

    def send(self, message: Any) -> None:
        """Send the name of a method of the averager, and its positional and other arguments."""


class Signal:
    """The trainer's side of a future that the averager's process waits for.

    Args:
        send: Sends the name of the future's method to call.
    """

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send, self._done = send, False

    def done(self) -> bool:
        """Return whether the future has its result, or was cancelled."""
        return self._done

    def set_result(self, result: None) -> None:
        """Set the result."""
        self._end("set_result")

    def cancel(self) -> None:
        """Cancel the future."""
        self._end("cancel")

    def _end(self, method: str) -> None:
        if not self._done:
            self._done = True
            with suppress(OSError, ValueError):  # the process has ended; the watchdog reports it
                self._send(method)


class Step(StepControl):
    """One step of an averager, in the trainer's process or in the averager's.

    Args:
        memory: Memory that both processes share.
        deadline: Time after which a failed step is not repeated [s], of the DHT's clock.
        allow_retries: Whether a failed step is repeated.
        gather: Data to gather.
        moved: Returns the time at which data moved last [s], of ``time.monotonic``.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        deadline: float,
        allow_retries: bool,
        gather: bytes,
        moved: Callable[[], float],
    ) -> None:
        MPFuture.__init__(self)  # not that of StepControl, which shares new memory
        self._shared_state_code, self._shared_buffer = memory[0], memory[1:]
        memory[0], self._moved = 0, moved  # 0: pending
        self._data_for_gather, self._deadline = gather, deadline
        self._allow_retries = allow_retries
        self._trigger = self._cancel = None
        self.stage, self.began_allreduce = AveragingStage.IDLE, False

    @classmethod
    def arrived(
        cls, memory: torch.Tensor, pipe: Any, origin: int, uid: int, fixed: tuple[Any, ...]
    ) -> Step:
        """Return the averager's side of a step.

        Args:
            memory: Memory of the step.
            pipe: Pipe for its result.
            origin: Id of the trainer's process.
            uid: Id of the step.
            fixed: What does not change: deadline, whether to retry, and data to gather.
        """
        deadline, allow_retries, gather = fixed
        step = cls.__new__(cls)
        step.__setstate__(
            {
                "_sender_pipe": pipe,
                "_shared_state_code": _NOTHING,
                "_origin_pid": origin,
                "_uid": uid,
                "_result": None,
                "_exception": None,
                "_use_lock": True,
                "_trigger": None,
                "_cancel": None,
                "_shared_buffer": memory[1:],
                "immutable_params": (gather, deadline, allow_retries),
            }
        )
        step._shared_state_code = memory[0]
        return step

    def result(self, timeout: float | None = None) -> Any:
        """Return the outcome.

        Args:
            timeout: Longest wait [s]; it begins anew whenever bulk data move.

        Raises:
            TimeoutError: It takes too long, or the averager does not react.
        """
        began = time.monotonic()
        wait: float | None = NOTICE_S if timeout is None else min(NOTICE_S, timeout)
        while True:
            try:
                return super().result(wait)
            except TimeoutError:
                if self.done():
                    raise
            now = time.monotonic()
            if self.stage == AveragingStage.IDLE and now >= began + NOTICE_S:
                raise TimeoutError("the averager does not react")
            wait = None
            if timeout is not None:
                wait = max(began, self._moved()) + timeout - now
                if wait <= 0:
                    raise TimeoutError("the step takes too long")


class StepRequests:
    """Requests of steps, from the trainer to an averager's process.

    Make it before the averager's process, which inherits it.

    Args:
        requests: Way to the averager's process.
        moved: Returns the time at which data of a step moved last [s], of ``time.monotonic``.
    """

    def __init__(self, requests: Pipe, moved: Callable[[], float]) -> None:
        MPFuture._maybe_initialize_mpfuture_backend()
        self._requests, self._moved, self._origin = requests, moved, os.getpid()
        self._pipe = MPFuture._global_sender_pipe
        memory = torch.zeros([STEPS, 1 + CONTROL], dtype=torch.uint8)
        self._memory: torch.Tensor = memory.share_memory_()  # type: ignore[no-untyped-call]
        self._rows = itertools.cycle(range(STEPS))
        self._running: dict[int, Step] = {}

    # -- in the trainer's process ------------------------------------------------------------------

    def request(
        self,
        *,
        scheduled_time: float,
        deadline: float,
        allow_retries: bool,
        weight: float,
        gather: bytes,
    ) -> Step:
        """Ask the averager for a step; the arguments are those of hivemind's ``StepControl``."""
        row = next(self._rows)
        step = Step(self._memory[row], deadline, allow_retries, gather, self._moved)
        step.scheduled_time, step.weight = scheduled_time, weight
        uid = step._uid

        def signal(name: str) -> Signal:
            request = "_signal_step"
            return Signal(lambda method: self._requests.send((request, [uid, name, method], {})))

        step.attach(signal("_trigger"), signal("_cancel"))
        self._requests.send(("_take_step", [row, uid, (deadline, allow_retries, gather)], {}))
        return step

    # -- in the averager's process -----------------------------------------------------------------

    @contextmanager
    def taken(
        self, row: int, uid: int, fixed: tuple[Any, ...]
    ) -> Iterator[tuple[Step, Future[Any]]]:
        """Yield a requested step, and a future for what hivemind would attach to it.

        Signals about the step arrive as long as the context is active.
        """
        step = Step.arrived(self._memory[row], self._pipe, self._origin, uid, fixed)
        self._running[uid] = step
        try:
            yield step, Future()
        finally:
            del self._running[uid]

    async def signal(self, uid: int, name: str, method: str) -> None:
        """Pass a signal on to its step, unless the step has ended."""
        future = getattr(self._running.get(uid), name, None)
        if future is not None:
            with suppress(InvalidStateError, CancelledError):  # it has one already
                future.set_result(None) if method == "set_result" else future.cancel()
