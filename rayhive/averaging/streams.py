"""Streams between averagers: closed by the reading side, or cancelled with a message.

When the answering side closes a stream first, p2pd occasionally resets it instead of ending it. The
reader then loses data that has arrived and was not read yet: the last averaged part of a round, the
leader's message that a group begins, or the end of a downloaded state. The answering side therefore
keeps the stream open by sleeping, and the reading side closes it after the last message. hivemind
then cancels the handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import anext, as_aiter

T = TypeVar("T")

#: Longest wait for a reader that is known to close the stream [s].
PATIENCE = 10.0
#: Longest wait for a reader that may itself wait for the end of the stream [s].
COURTESY = 1.0


async def noted(stream: AsyncIterator[T], note: Callable[[], None]) -> AsyncGenerator[T, None]:
    """Pass a stream through, and call ``note`` at each message."""
    try:
        async for message in stream:
            note()
            yield message
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


async def until(
    stream: AsyncGenerator[T, Any], last: Callable[[T], bool]
) -> AsyncGenerator[T, None]:
    """Pass a stream through and close it after the first message for which ``last`` holds."""
    async with aclosing(stream):
        async for message in stream:
            yield message
            if last(message):
                return


async def completed(
    state: AsyncIterator[averaging_pb2.DownloadData],
) -> AsyncGenerator[averaging_pb2.DownloadData, None]:
    """Pass a state through, then an empty message that marks it as complete, unless it is empty."""
    anything = False
    async for part in state:
        anything = True
        yield part
    if anything:
        yield averaging_pb2.DownloadData()
        await asyncio.sleep(COURTESY)


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


#: Longest wait for a peer to accept a cancellation message [s].
CANCEL_S = 2.0


class Cancellations:
    """Sends cancellation messages in the background, so that no peer waits for missing parts.

    Args:
        stub_of: Returns the remote side of a peer.
    """

    def __init__(self, stub_of: Callable[[PeerID], Any]) -> None:
        self._stub_of = stub_of
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, peers: Sequence[PeerID], allreduce_ids: Sequence[bytes]) -> None:
        """Send a message for each all-reduce to each peer; do not wait for the answers."""
        for peer in peers:
            task = asyncio.create_task(self._send(peer, allreduce_ids))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, peer: PeerID, allreduce_ids: Sequence[bytes]) -> None:
        stub = self._stub_of(peer)
        for key in allreduce_ids:
            message = averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED, group_id=key)
            with suppress(Exception):  # the peer may have left as well
                opening = stub.rpc_aggregate_part(as_aiter(message))
                answers = await asyncio.wait_for(opening, CANCEL_S)
                async with aclosing(answers):
                    await asyncio.wait_for(anext(answers), CANCEL_S)
