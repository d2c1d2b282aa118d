"""All-reduces between runners of one process, without the network daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.p2p import PeerID, ServicerBase

from rayhive.averaging.allreduce import MeasuredAllReduce
from rayhive.averaging.transport import DaemonTransport, Transport
from rayhive.compression.shares import reducer_shares
from rayhive.registry import CODECS

SHAPES = [(120, 200), (13,), (1,), (7, 3, 3)]
#: Options of a group with members of hivemind, whose partition it has to use.
MIXED = {"shares": None, "part_size_bytes": 256}
LIMIT = 30.0


def _same(transport: Transport) -> Transport:
    return transport


#: Calls a runner for a sender: takes the runner, the sender's stream and the context of the call.
Call = Callable[[MeasuredAllReduce, Any, Any], Awaitable[Any]]


async def direct(runner: MeasuredAllReduce, stream: Any, context: Any) -> Any:
    """Call a runner as it is."""
    return runner.rpc_aggregate_part(stream, context)


def loopback(
    peers: int,
    codec: str = "none",
    calls: Mapping[PeerID, Call] | None = None,
    transports: Mapping[PeerID, Callable[[Transport], Transport]] | None = None,
    tensors: Sequence[list[torch.Tensor]] | None = None,
    **options: Any,
) -> list[MeasuredAllReduce]:
    """Return the runners of one group, connected to each other by function calls.

    Args:
        peers: Size of the group.
        codec: Name of the codec.
        calls: Ways to call single peers; the rest is called directly.
        transports: For single peers, what makes their transport from that by function calls.
        tensors: Tensors of each peer; None for random ones of :data:`SHAPES`.
        options: Arguments of the runners.
    """
    shares = options.pop("shares", reducer_shares([None] * peers))
    runners: dict[PeerID, MeasuredAllReduce] = {}

    class Loopback(ServicerBase):
        @classmethod
        def get_stub(cls, p2p: Any, peer: PeerID, *, namespace: str | None = None) -> Any:
            context = SimpleNamespace(remote_id=p2p.peer_id)

            async def rpc_aggregate_part(stream: Any) -> Any:
                return await (calls or {}).get(peer, direct)(runners[peer], stream, context)

            return SimpleNamespace(rpc_aggregate_part=rpc_aggregate_part)

    names = tuple(PeerID(f"peer {index}".encode()) for index in range(peers))
    for index, name in enumerate(names):
        generator = torch.Generator().manual_seed(index)
        by_calls = DaemonTransport(
            partial(Loopback.get_stub, SimpleNamespace(peer_id=name), namespace=None)
        )
        runners[name] = MeasuredAllReduce(
            transport=(transports or {}).get(name, _same)(by_calls),
            p2p=SimpleNamespace(peer_id=name),
            servicer_type=Loopback,
            prefix=None,
            group_id=b"group",
            tensors=tensors[index]
            if tensors is not None
            else [torch.randn(shape, generator=generator) for shape in SHAPES],
            ordered_peer_ids=names,
            peer_fractions=(1 / peers,) * peers if shares is None else tuple(map(float, shares)),
            compression=CODECS.get(codec)().build(),
            shares=shares,
            **options,
        )
    return list(runners.values())


async def average(runners: Sequence[MeasuredAllReduce]) -> list[list[torch.Tensor]]:
    """Run the group; return what every peer's tensors became."""

    async def one(runner: MeasuredAllReduce) -> list[torch.Tensor]:
        return [tensor async for tensor in runner]

    return await asyncio.wait_for(asyncio.gather(*map(one, runners)), LIMIT)
