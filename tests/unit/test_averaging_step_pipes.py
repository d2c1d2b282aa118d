"""Requests of the trainer on their way to an averager."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayhive.averaging.step_pipes import RequestPipe, serve_states

LIMIT = 20.0


class Averager:
    """Notes its requests; its loop is that of hivemind, less the semaphore."""

    def __init__(self) -> None:
        self.trainer, end = Pipe(duplex=True)
        self.asked: list[Any] = []
        self.came = asyncio.Event()
        self.pipe = RequestPipe(end, self)

    async def note(self, *args: Any, **kwargs: Any) -> None:
        self.asked.append((args, kwargs))
        self.came.set()

    async def next_of_hivemind(self) -> Any:
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self.pipe.fileno(), readable.set)
        await asyncio.wait_for(readable.wait(), LIMIT)
        loop.remove_reader(self.pipe.fileno())
        assert self.pipe.poll()
        return self.pipe.recv()

    async def begin(self) -> None:
        self.pipe.open()
        method, args, kwargs = await self.next_of_hivemind()
        await getattr(self, method)(*args, **kwargs)


def test_nothing_wakes_hiveminds_loop_before_the_averager_is_ready() -> None:
    """Each turn of the event loop would count one message for it to look for."""
    averager = Averager()
    averager.trainer.send(("note", [1], {}))
    assert not averager.pipe.poll()
    averager.pipe.open()
    assert averager.pipe.poll()


def test_requests_from_before_the_loop_and_later_ones_are_served() -> None:
    async def body() -> None:
        averager = Averager()
        averager.trainer.send(("note", [1], {"a": 2}))
        await asyncio.sleep(0)
        assert not averager.asked, "the averager is not ready yet"
        await averager.begin()
        await asyncio.wait_for(averager.came.wait(), LIMIT)
        averager.came.clear()
        averager.trainer.send(("note", [3], {}))
        await asyncio.wait_for(averager.came.wait(), LIMIT)
        assert averager.asked == [((1,), {"a": 2}), ((3,), {})]
        assert not averager.pipe.poll(), "hivemind's loop sees none of them"
        averager.pipe.send("to the trainer")
        assert averager.trainer.recv() == "to the trainer"

    asyncio.run(body())


def test_hivemind_gets_the_shutdown_and_nothing_is_served_after_it() -> None:
    async def body() -> None:
        averager = Averager()
        await averager.begin()
        averager.trainer.send(("_shutdown", [1.0], {}))
        averager.trainer.send(("note", [1], {}))
        assert await averager.next_of_hivemind() == ("_shutdown", [1.0], {})
        await asyncio.sleep(0)
        assert not averager.asked

    asyncio.run(body())


def test_hivemind_notices_the_end_of_the_trainer() -> None:
    async def body() -> None:
        averager = Averager()
        await averager.begin()
        averager.trainer.close()
        with pytest.raises(EOFError):
            await averager.next_of_hivemind()

    asyncio.run(body())


def serve(*requests: Any, alive: bool = True) -> list[Any]:
    """Serve requests of a state; return those that are left. Every second state is an error."""
    left, states = list(requests), iter([0, 1, 0, 1])

    def state() -> Any:
        if next(states):
            raise OverflowError("no state")
        return {"epoch": 3}, (torch.ones(2),), None

    def recv() -> Any:
        if not left:
            raise EOFError
        return "_TRIGGER_GET_CURRENT_STATE", left.pop(0)

    pipe, serializer = SimpleNamespace(recv=recv), SimpleNamespace(dumps=pickle.dumps)
    serve_states(serializer, pipe, lambda: state if alive else None)  # type: ignore[arg-type]
    return left


def test_states_are_served_until_the_averager_ends_and_after_an_error() -> None:
    first, failing, last = futures = [Future[Any]() for _ in range(3)]
    assert serve(*futures) == []
    for future in (first, last):
        metadata, (tensor,), infos = future.result(0)
        assert (pickle.loads(metadata), tensor.tolist(), infos) == ({"epoch": 3}, [1.0, 1.0], None)
    with pytest.raises(OverflowError, match="no state"):
        failing.result(0)


def test_no_state_is_served_once_the_averager_is_shut_down_or_gone() -> None:
    future = Future[Any]()
    assert serve(None, future) == [future]
    assert serve(future, alive=False) == []
    assert not future.done()
