"""Work of payload policies beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rayhive.averaging.policy_thread import FEW, PolicyThread

LIMIT = 20.0


@pytest.mark.parametrize(
    ("elements", "beside"), [(0, False), (FEW, False), (FEW + 1, True), (None, True)]
)
def test_much_work_and_work_of_other_processes_leave_the_loop_free(
    elements: int | None, beside: bool
) -> None:
    async def body() -> None:
        where = await PolicyThread("test", elements).run(threading.get_ident)
        assert (where != threading.get_ident()) == beside

    asyncio.run(body())


@pytest.mark.parametrize("elements", [0, None])
def test_the_error_of_work_is_that_of_the_call(elements: int | None) -> None:
    async def body() -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            await PolicyThread("test", elements).run(int, "x")

    asyncio.run(body())


@pytest.mark.parametrize("final", [False, True])
def test_work_whose_caller_was_cancelled_ends_first(final: bool) -> None:
    async def body() -> None:
        begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

        def work() -> str:
            begun.set()
            assert may_end.wait(LIMIT)
            ended.set()
            return "result"

        call = asyncio.create_task(PolicyThread("test", None).run(work, final=final))
        await asyncio.to_thread(begun.wait, LIMIT)
        call.cancel()
        await asyncio.sleep(0)
        assert not call.done(), "it would leave work behind"
        may_end.set()
        if final:
            assert await call == "result"
        else:
            with pytest.raises(asyncio.CancelledError):
                await call
        assert ended.is_set()

    asyncio.run(body())
