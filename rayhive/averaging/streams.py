"""Streams of answers that are closed by the reading side.

When the answering side closes a stream first, p2pd occasionally resets it instead of ending it. The
reader then loses data that has arrived and was not read yet: the last averaged part of a round, the
leader's message that a group begins, or the end of a downloaded state. The answering side therefore
keeps the stream open, and the reading side closes it after the last message. hivemind then cancels
the handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from hivemind.proto import averaging_pb2

T = TypeVar("T")

#: Longest wait for a reader that is known to close the stream [s].
PATIENCE = 10.0
#: Longest wait for a reader that may itself wait for the end of the stream [s].
COURTESY = 1.0


async def stay_open(seconds: float) -> None:
    """Keep a handler's stream open until its reader closes it, which cancels the handler."""
    await asyncio.sleep(seconds)


async def until(stream: AsyncGenerator[T, Any], last: Callable[[T], bool]) -> AsyncIterator[T]:
    """Pass a stream through and close it after the first message for which ``last`` holds."""
    async with aclosing(stream):
        async for message in stream:
            yield message
            if last(message):
                return


class DownloadStub:
    """Remote side of a peer that reads a state until it is complete."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Download a peer's state; close the stream after the message that marks its end."""
        opening = self._stub.rpc_download_state(request)
        messages = await asyncio.wait_for(opening, PATIENCE)  # a dead peer may never answer
        return until(messages, lambda message: not message.ByteSize())
