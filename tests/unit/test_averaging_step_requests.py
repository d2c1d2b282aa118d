"""Steps between a trainer and the process of an averager, here a fork without an averager."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pytest

from rayhive.averaging import step_requests
from rayhive.averaging.step_requests import StepRequests
from rayhive.averaging.steps import RunningSteps

WAIT_S = 60.0


class Sent:
    """Pipe to nobody."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.ended = False

    def send(self, message: Any) -> None:
        self.methods.append(message[0])
        if self.ended:
            raise BrokenPipeError


class Averager:
    """Process that takes requests, and answers each step with what it was told of it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._near, far = context.Pipe()
        self.requests = StepRequests(self._near, time.monotonic)
        self._process = context.Process(target=lambda: asyncio.run(self._serve(far)), daemon=True)

    def start(self) -> None:
        self._process.start()

    def end(self) -> None:
        self._near.send(None)
        self.wait()

    def wait(self) -> None:
        self._process.join(WAIT_S)
        assert self._process.exitcode == 0

    async def _serve(self, pipe: Any) -> None:
        loop, tasks = asyncio.get_running_loop(), set()
        while (message := await loop.run_in_executor(None, pipe.recv)) is not None:
            method, arguments, _ = message
            if method == "_signal_step":
                await self.requests.signal(*arguments)
            else:
                tasks.add(asyncio.ensure_future(self._take(arguments)))
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)

    async def _take(self, arguments: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        with self.requests.taken(*arguments) as (step, attached):
            trigger, cancel = loop.create_future(), loop.create_future()
            step.attach(trigger, cancel)
            attached.set_result((trigger, cancel))
            try:
                await step.wait_for_trigger()
            except asyncio.CancelledError:
                await step.wait_for_cancel()
                return
            given = step.weight, step.deadline, step.allow_retries, step.data_for_gather
            step.set_result(given)


class Leaving(Averager):
    """Process that takes one step, reads no more requests, and cancels it, as at a shutdown."""

    def end(self) -> None:
        self.wait()

    async def _serve(self, pipe: Any) -> None:
        loop, steps = asyncio.get_running_loop(), RunningSteps()
        _, arguments, _ = await loop.run_in_executor(None, pipe.recv)
        with self.requests.taken(*arguments) as (step, _), steps.running(step):
            step.attach(loop.create_future(), loop.create_future())
            steps.cancel()
            await asyncio.wait_for(step.wait_for_cancel(), WAIT_S)
            assert step.cancelled()


@contextmanager
def running(make: type[Averager] = Averager) -> Iterator[StepRequests]:
    averager = make()
    averager.start()
    yield averager.requests
    averager.end()


def request(requests: StepRequests, gather: bytes, weight: float = 1.0) -> Any:
    return requests.request(
        scheduled_time=0.0, deadline=2e12, allow_retries=False, weight=weight, gather=gather
    )


def test_a_step_begins_with_its_trigger_and_the_last_weight() -> None:
    with running() as requests:
        first, second = request(requests, b"first"), request(requests, b"second", weight=3.0)
        first.weight = 2.0
        second.allow_allreduce()
        assert second.result(WAIT_S) == (3.0, 2e12, False, b"second")
        assert (first.done(), first.triggered, second.triggered) == (False, False, True)
        first.allow_allreduce()
        assert first.result(WAIT_S) == (2.0, 2e12, False, b"first")


def test_a_cancelled_step_ends_on_both_sides() -> None:
    with running() as requests:  # its end waits for all steps
        step = request(requests, b"")
        assert step.cancel()
        with pytest.raises(CancelledError):
            step.result(WAIT_S)


def test_an_averager_that_ends_cancels_its_steps_by_itself() -> None:
    """Its search for a group would go on otherwise, and crash the DHT with a late message."""
    with running(Leaving) as requests:
        step = request(requests, b"")
        with pytest.raises(CancelledError):
            step.result(WAIT_S)


def test_memory_of_ended_steps_is_used_again() -> None:
    with running() as requests:
        for number in range(step_requests.STEPS + 3):
            step = request(requests, b"%d" % number, weight=number)
            assert not step.done()
            step.allow_allreduce()
            assert step.result(WAIT_S) == (number, 2e12, False, b"%d" % number)


def test_an_averager_that_does_not_react_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_requests, "NOTICE_S", 0.01)
    step = request(StepRequests(Sent(), time.monotonic), b"")
    step.allow_allreduce()
    with pytest.raises(TimeoutError, match="does not react"):
        step.result(WAIT_S)


def test_signals_to_a_process_that_has_ended_are_dropped() -> None:
    pipe = Sent()
    step = request(StepRequests(pipe, time.monotonic), b"")
    pipe.ended = True
    step.allow_allreduce()
    assert step.cancel()
    assert pipe.methods == ["_take_step", "_signal_step", "_signal_step"]
