"""Streams of answers that are closed by the side that reads them.

When the answering side closes a stream first, p2pd now and then resets it instead of ending it,
and the reader loses what has arrived but was not read yet: the last averaged part of a round, the
leader's word that a group begins, or the tail of a downloaded state. So whoever answers keeps the
stream open, and whoever has all that it wanted hangs up. hivemind then cancels the handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from hivemind.proto import averaging_pb2

T = TypeVar("T")

#: Longest wait for a reader that is known to hang up [s].
PATIENCE = 10.0
#: Longest wait for a reader that may be waiting for us to close [s].
COURTESY = 1.0


async def stay_open(seconds: float) -> None:
    """Keep a handler's stream open until its reader hangs up, which cancels the handler."""
    await asyncio.sleep(seconds)


async def until(stream: AsyncGenerator[T, Any], last: Callable[[T], bool]) -> AsyncIterator[T]:
    """Pass a stream through and hang up after the first message for which ``last`` holds."""
    async with aclosing(stream):
        async for message in stream:
            yield message
            if last(message):
                return


class DownloadStub:
    """The remote side of a peer, from which a state is read until it is complete."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Download a peer's state, hanging up on the message that says it is complete."""
        opening = self._stub.rpc_download_state(request)
        messages = await asyncio.wait_for(opening, PATIENCE)  # a dead peer may never refuse
        return until(messages, lambda message: not message.ByteSize())
