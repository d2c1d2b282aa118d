"""A swarm of real group_formation on one event loop whose clock jumps to the next event."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID

from rayhive.averaging.group_formation import GroupFormation
from rayhive.averaging.quorum import Quorum
from rayhive.membership.view import Member

WINDOW, PATIENCE, LONGEST = 30.0, 60.0, 600.0
LATENCY = 0.05


class Swarm:
    """Peers that reach each other with random latency, each with a view of its own."""

    def __init__(self, names: list[str], seed: int = 0, quorum: Quorum | None = None) -> None:
        self.random = random.Random(seed)
        self.ids = {name: PeerID(name.encode()) for name in names}
        self.peers: dict[str, GroupFormation] = {}
        self.dead: set[str] = set()
        for name in names:
            self.peers[name] = GroupFormation(
                self.ids[name],
                client_mode=False,
                schema_hash=b"s",
                key="k",
                ask=self._asker(name),
                quorum=quorum,
            )

    def _asker(self, caller: str) -> Any:
        async def ask(leader: PeerID, request: Any) -> AsyncIterator[Any]:
            name = leader.to_bytes().decode()
            await self.travel(name)
            return self._stream(name, self.peers[name].rpc_join_group(request, self.ids[caller]))

        return ask

    async def travel(self, name: str) -> None:
        await asyncio.sleep(self.random.uniform(0, LATENCY))
        if name in self.dead:
            raise ConnectionError(f"{name} is dead")

    async def _stream(self, name: str, answers: Any) -> AsyncIterator[Any]:
        try:
            async for message in answers:
                await self.travel(name)
                yield message
        finally:
            await answers.aclose()

    def member(
        self, name: str, round_: int = 0, averaged: int = 0, entered: int | None = None
    ) -> Member:
        return Member(self.ids[name].to_bytes(), False, round_, averaged, averaged, entered)

    def all_see(self, names: list[str]) -> None:
        for peer in self.peers.values():
            peer.set_members([self.member(name) for name in names])

    def all_see_arrivals(self, names: list[str], here: str) -> None:
        """Show all peers that those in ``here`` have reached round 1 and the rest computes."""
        for peer in self.peers.values():
            peer.set_members([self.member(name, entered=int(name in here)) for name in names])

    async def meet(self, name: str, round_: int = 1) -> GroupInfo:
        peer = self.peers[name]
        group = await peer.meet(round_, name.encode(), WINDOW, PATIENCE, LONGEST)
        peer.leave_behind(round_)
        return group


def names_of(group: GroupInfo) -> set[str]:
    return {peer.to_bytes().decode() for peer in group.peer_ids}
