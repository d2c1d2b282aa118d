"""Cancellation messages: a peer announces that it sends no more parts of an all-reduce."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import anext, as_aiter

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
            with contextlib.suppress(Exception):  # the peer may have left as well
                opening = stub.rpc_aggregate_part(as_aiter(message))
                answers = await asyncio.wait_for(opening, CANCEL_S)
                async with contextlib.aclosing(answers):
                    await asyncio.wait_for(anext(answers), CANCEL_S)
