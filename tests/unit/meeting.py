"""Peers of one process whose payload policies average by real all-reduces, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.compression import CompressionBase, NoCompression
from hivemind.p2p import PeerID, ServicerBase

from rayhive.averaging.allreduce import MeasuredAllReduce
from rayhive.averaging.payload_policy import GroupRound
from rayhive.compression.shares import reducer_shares
from tests.unit.averaging_fakes import pumped

#: Longest round [s].
LIMIT = 30.0
#: Longest wait for answers that are still leaving [s].
DRAIN = 0.3


class Meeting:
    """The all-reduces of one group, whose members call each other directly.

    Args:
        weights: Weight of each member, by name.
        codec: Codec of the group; without compression, the policies' own codecs are used.
        absent: Members that were lost when the group began.
        rates: Rate of each member's link, or None; equal ones by default.

    Attributes:
        sent_bytes: Payload that all members have sent.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        codec: CompressionBase,
        absent: Collection[str] = (),
        rates: Sequence[float | None] = (),
    ) -> None:
        self.weights, self._codec = dict(weights), codec
        self.plain = type(codec) is NoCompression
        self.sent_bytes = 0
        self._shares = reducer_shares(rates or [None] * len(weights))
        self._ids = {name: PeerID(name.encode()) for name in weights}
        self._absent = frozenset(self._ids[name].to_bytes() for name in absent)
        self._runners: dict[tuple[str, PeerID], asyncio.Future[MeasuredAllReduce]] = {}

    def _runner(self, phase: str, peer: PeerID) -> asyncio.Future[MeasuredAllReduce]:
        loop = asyncio.get_running_loop()
        return self._runners.setdefault((phase, peer), loop.create_future())

    async def allreduce(
        self,
        name: str,
        phase: str,
        tensors: Sequence[torch.Tensor],
        owed: Sequence[torch.Tensor] | None = None,
        exact: int = 0,
        codec: CompressionBase | None = None,
    ) -> float:
        """Average in place; return the fraction."""
        meeting, own = self, self._ids[name]

        class Loopback(ServicerBase):
            @classmethod
            def get_stub(cls, p2p: Any, peer: PeerID, *, namespace: str | None = None) -> Any:
                async def rpc_aggregate_part(stream: Any) -> Any:
                    runner = await asyncio.shield(meeting._runner(phase, peer))
                    context: Any = SimpleNamespace(remote_id=own)
                    return pumped(runner.rpc_aggregate_part(stream, context))

                return SimpleNamespace(rpc_aggregate_part=rpc_aggregate_part)

        runner = MeasuredAllReduce(
            p2p=SimpleNamespace(peer_id=own),
            servicer_type=Loopback,
            prefix=None,
            group_id=phase.encode(),
            tensors=tensors,
            ordered_peer_ids=tuple(self._ids.values()),
            peer_fractions=tuple(map(float, self._shares)),
            shares=self._shares,
            compression=codec or self._codec,
            weight=self.weights[name],
            absent=self._absent,
            owed=owed,
            exact=exact,
        )
        self._runner(phase, own).set_result(runner)
        async for _ in runner:
            pass
        await runner.drain(DRAIN)
        self.sent_bytes += runner.sent_bytes
        return runner.fraction()


async def take_part(
    meeting: Meeting, name: str, policy: Any, gradients: Sequence[torch.Tensor], **options: Any
) -> None:
    """Average a peer's gradients by its policy.

    Args:
        meeting: The group.
        name: The peer.
        policy: Its payload policy.
        gradients: Its averaged gradients.
        options: ``fails``: phase after which the peer fails. ``step``: its step. ``limit``: longest
            time of the round [s].
    """

    async def allreduce(
        phase: str, tensors: Any, owed: Any = None, exact: int = 0, codec: Any = None
    ) -> float:
        fraction = await meeting.allreduce(name, phase, tensors, owed, exact, codec)
        if options.get("fails") == phase:
            raise RuntimeError("the network is gone")
        return fraction

    members = dict.fromkeys(meeting.weights)
    weight, step = meeting.weights[name], options.get("step")
    round_ = GroupRound(allreduce, members, weight=weight, step=step, plain=meeting.plain)
    await asyncio.wait_for(policy.average(gradients, round_), options.get("limit", LIMIT))
