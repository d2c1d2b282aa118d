"""Averagers that are built and never started, on a DHT without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer

from rayhive.averaging.outlier_filter import Announcement
from rayhive.averaging.round_filter import attached

PEER = PeerID(b"the peer itself")
OTHER = PeerID(b"another peer")


def unstarted(
    kind: Any,
    shapes: Sequence[tuple[int, ...]],
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """Return an averager of gradients of these shapes that has no process."""
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    dht = SimpleNamespace(client_mode=False, peer_id=PEER)
    options = {"prefix": "test", "dht": dht, "start": False, **options}
    return kind(parameters=parameters, **options)


def group_of_one(group_id: bytes = b"group") -> GroupInfo:
    """Return a group in which the peer is alone."""
    dumps = MSGPackSerializer.dumps
    return GroupInfo(group_id, (PEER,), (dumps([None, 0, dumps("mine")]),))


def announced_group(*norms: float) -> GroupInfo:
    """Return a group of the peer and another one that have announced such norms."""
    dumps = MSGPackSerializer.dumps
    announced = [attached(dumps(7), Announcement(norm, 1.0)) for norm in norms]
    return GroupInfo(b"group", (PEER, OTHER), tuple(dumps([1.0, 0, each]) for each in announced))


async def stream_of(*messages: Any) -> AsyncIterator[Any]:
    """Yield messages, as a request stream does."""
    for message in messages:
        yield message


def pumped(answers: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Return answers that a handler gives whether they are read or not, as through a daemon."""
    arrived: asyncio.Queue[Any] = asyncio.Queue()
    end = object()

    async def pump() -> None:
        try:
            async for answer in answers:
                arrived.put_nowait(answer)
        finally:
            arrived.put_nowait(end)

    handler = asyncio.ensure_future(pump())

    async def read() -> AsyncGenerator[Any, None]:
        try:
            while (answer := await arrived.get()) is not end:
                yield answer
            await handler
        finally:
            handler.cancel()  # as hivemind does when the reader hangs up

    return read()


async def settle() -> None:
    """Run all callbacks that are due now."""
    for _ in range(20):
        await asyncio.sleep(0)
