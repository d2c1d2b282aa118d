"""Time limits of rounds: they count the time without progress, not the whole round."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from concurrent import futures
from typing import Any

import pytest

from rayhive.averaging.step_requests import StepRequests
from rayhive.averaging.timeouts import in_time, while_it_moves, within

FAR = 60.0


def test_work_goes_on_as_long_as_it_moves(run: Any) -> None:
    async def body() -> None:
        moved = 0

        async def work() -> None:
            nonlocal moved
            for _ in range(8):
                await asyncio.sleep(0.2)
                moved += 1

        await while_it_moves(work(), lambda: moved, 1.0)
        assert moved == 8

    run(body())


def test_work_that_stands_still_is_cancelled() -> None:
    async def body() -> None:
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(FAR)
            finally:
                ended.set()

        with pytest.raises(asyncio.TimeoutError, match=r"no progress for 0\.05 s"):
            await while_it_moves(work(), lambda: 0, 0.05)
        assert ended.is_set()

    asyncio.run(body())


def test_the_error_of_work_is_passed_on_and_a_cancellation_ends_it() -> None:
    async def body() -> None:
        ended = asyncio.Event()

        async def fails() -> None:
            raise OSError("the error")

        async def waits() -> None:
            try:
                await asyncio.sleep(FAR)
            finally:
                ended.set()

        with pytest.raises(OSError, match="the error"):
            await while_it_moves(fails(), lambda: 0, None)
        waiting = asyncio.create_task(while_it_moves(waits(), lambda: 0, None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended.is_set()

    asyncio.run(body())


class Moves:
    """Time at which data moved last; it is now until the test ends that."""

    def __init__(self) -> None:
        self.ended_at: float | None = None

    def __call__(self) -> float:
        return time.monotonic() if self.ended_at is None else self.ended_at


class Nobody:
    """Pipe to nobody."""

    def send(self, message: Any) -> None:
        """Drop the message."""


def step(moves: Moves) -> Any:
    made = StepRequests(Nobody(), moves).request(
        scheduled_time=0.0, deadline=2e12, allow_retries=True, weight=1.0, gather=b""
    )
    made.allow_allreduce()
    return made


def test_a_result_is_awaited_as_long_as_data_move() -> None:
    moves = Moves()
    made = step(moves)
    timer = threading.Timer(0.5, made.set_result, args=("averaged",))
    timer.start()
    assert made.result(0.1) == "averaged"
    timer.join()


def test_the_wait_ends_when_data_stop_to_move() -> None:
    moves = Moves()
    made = step(moves)

    def stop() -> None:
        moves.ended_at = time.monotonic()

    timer = threading.Timer(0.3, stop)
    timer.start()
    with pytest.raises(futures.TimeoutError):
        made.result(0.1)
    assert moves.ended_at is not None
    timer.join()
    made.set_exception(TimeoutError("of the averager"))
    with pytest.raises(TimeoutError, match="of the averager"):
        made.result(FAR)


# -- streams ---------------------------------------------------------------------------------------


async def slow_from(
    number: int, ended: asyncio.Event, waits: asyncio.Event
) -> AsyncGenerator[int, None]:
    """Yield numbers, and never the one with this number."""
    try:
        for each in range(number):
            await asyncio.sleep(0)
            yield each
        waits.set()
        await asyncio.sleep(FAR)
        yield number
    finally:
        ended.set()


@pytest.mark.parametrize("timeout", [None, FAR])
def test_a_stream_in_time_is_passed_on(timeout: float | None) -> None:
    async def stream() -> AsyncGenerator[int, None]:
        for number in range(5):
            yield number

    async def body() -> None:
        assert [number async for number in in_time(stream(), timeout)] == list(range(5))

    asyncio.run(body())


@pytest.mark.parametrize("number", [0, 3])
def test_an_item_that_does_not_come_ends_a_stream(run: Any, number: int) -> None:
    async def body() -> None:
        ended, got = asyncio.Event(), []
        with pytest.raises(asyncio.TimeoutError, match=r"nothing came for 0\.05 s"):
            async for each in in_time(slow_from(number, ended, asyncio.Event()), 0.05):
                got.append(each)
        assert got == list(range(number))
        assert ended.is_set(), "the wait for it was cancelled"
        await asyncio.sleep(0)  # the task itself is not cancelled

    run(body())


def test_the_time_that_a_reader_takes_does_not_count(run: Any) -> None:
    async def body() -> None:
        got = []
        async for each in in_time(slow_from(4, asyncio.Event(), asyncio.Event()), 0.1):
            await asyncio.sleep(0.25)
            got.append(each)
            if len(got) == 4:
                break
        assert got == list(range(4))

    run(body())


def test_a_cancelled_reader_of_a_stream_is_cancelled() -> None:
    async def body() -> None:
        ended, waits = asyncio.Event(), asyncio.Event()

        async def read() -> None:
            async for _ in in_time(slow_from(2, ended, waits), FAR):
                pass

        reading = asyncio.create_task(read())
        await waits.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert ended.is_set()

    asyncio.run(body())


@pytest.mark.parametrize("in_stream", [True, False])
def test_a_cancellation_that_comes_with_the_result_is_not_lost(in_stream: bool) -> None:
    async def body() -> None:
        result: asyncio.Future[int] = asyncio.Future()

        async def stream() -> AsyncGenerator[int, None]:
            yield await result

        async def read() -> None:
            if in_stream:
                assert [each async for each in in_time(stream(), FAR)] == [1]
            else:
                assert await within(FAR, result) == 1

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        result.set_result(1)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(body())


@pytest.mark.parametrize("timeout", [None, FAR, 0.05])
def test_a_wait_ends_with_its_result_or_in_time(run: Any, timeout: float | None) -> None:
    async def result() -> int:
        await asyncio.sleep(1.0)
        return 1

    async def body() -> None:
        if timeout == 0.05:
            with pytest.raises(asyncio.TimeoutError, match=r"nothing came for 0\.05 s"):
                await within(timeout, result())
        else:
            assert await within(timeout, result()) == 1

    run(body())


def test_an_error_of_a_stream_is_passed_on() -> None:
    async def fails() -> AsyncGenerator[int, None]:
        yield 0
        raise OSError("the error")

    async def body() -> None:
        with pytest.raises(OSError, match="the error"):
            _ = [each async for each in in_time(fails(), FAR)]

    asyncio.run(body())
