"""Requests of a peer to join the group of a round that another peer leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2 as messages

from rayhive.averaging.awaited_members import Search

Ask = Callable[[PeerID, messages.JoinRequest], Awaitable[AsyncIterator[Any]]]


@dataclass(frozen=True)
class JoinRequests:
    """Requests of one peer, and the answers to them.

    Attributes:
        schema_hash: Fingerprint of its averaged tensors.
        client_mode: Whether other peers cannot call it.
        key: Prefix of its group keys; the round follows.
        ask: Sends a request to a leader and returns the stream of its answers.
    """

    schema_hash: bytes
    client_mode: bool
    key: str
    ask: Ask

    async def question(self, round_: int, member: PeerID) -> int:
        """Return the code of a member's answer to whether it has begun a round."""
        async with aclosing(await self._send(member, round_, 0.0)) as stream:
            async for message in stream:
                return int(message.code)
        return int(messages.GROUP_DISBANDED)

    async def join(
        self, leader: PeerID, search: Search, accepted: asyncio.Event
    ) -> messages.MessageFromLeader | None:
        """Return the leader's last message; None if the leader closed the stream without one.

        Args:
            leader: The leader.
            search: The search of this peer. Its patience begins anew whenever the leader says once
                more that the request is accepted: the round is under way without this peer.
            accepted: Set when the leader has accepted the request.
        """
        seconds = search.limit - asyncio.get_running_loop().time()
        async with aclosing(
            await self._send(leader, search.round, seconds, search.gather)
        ) as stream:
            async for message in stream:
                if message.code != messages.ACCEPTED:
                    return message
                if accepted.is_set():
                    search.note_begun(True)
                accepted.set()
                search.arrived.add(leader.to_bytes())
        return None

    async def _send(self, peer: PeerID, round_: int, seconds: float, gather: bytes = b"") -> Any:
        return await self.ask(
            peer,
            messages.JoinRequest(
                schema_hash=self.schema_hash,
                expiration=seconds,  # a duration: clocks may differ; 0 for a question
                client_mode=self.client_mode,
                gather=gather,
                group_key=f"{self.key}.0b{round_:b}",
            ),
        )


def round_of_key(group_key: str) -> int | None:
    """Return the round that a group key names; None if it names none."""
    _, found, bits = group_key.rpartition(".0b")
    return int(bits, 2) if found and bits else None
