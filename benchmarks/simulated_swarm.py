"""A swarm of real memberships and group formations on a virtual clock and network.

Every peer has its own view, its own protocol and its own group formation; only the clock and the
network are simulated, so that hundreds of peers fit into one process. A message takes the latency
of its link; a lost packet is sent again after a timeout, as TCP does.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID

from rayhive.averaging.group_formation import GroupFormation
from rayhive.membership.calls import Caller
from rayhive.membership.protocol import Protocol
from rayhive.membership.view import Heartbeat, MembershipView

SILENCE_S, HEARTBEAT_S = 4.0, 1.0
#: Time after which a lost packet is sent again [s].
RESEND_S = 0.2
#: Bytes of the data that a peer gathers for a group, and of an address.
GATHERED = 80
ADDRESS = "/ip4/203.0.113.77/tcp/31337/p2p/12D3KooWETEzjxKYLHXUutLqWp8TwcLWuBVRJAeipojEvqLzejGM"


@dataclass
class Traffic:
    """Messages and bytes that passed one peer, in both directions."""

    messages: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        self.messages += 1
        self.bytes += size


class Network:
    """Network of simulated peers.

    Args:
        latency_s: Range of the latencies of the links, each drawn once [s].
        loss: Share of the packets that are lost.
        seed: Seed of latencies and losses.

    Attributes:
        traffic: Traffic of each peer since the last :meth:`reset`.
        dead: Peers whose machine refuses connections.
        silent: Peers from and to which nothing passes.
        cut: Returns whether nothing passes between two peers.
        queue_s: Time that each message waits behind bulk data [s].
    """

    def __init__(self, latency_s: tuple[float, float], loss: float, seed: int) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self._range = latency_s
        self._latencies: dict[frozenset[bytes], float] = {}
        self.peers: dict[bytes, SimulatedPeer] = {}
        self.traffic: dict[bytes, Traffic] = {}
        self.dead: set[bytes] = set()
        self.silent: set[bytes] = set()
        self.cut: Callable[[bytes, bytes], bool] = lambda one, other: False
        self.queue_s = 0.0

    def reset(self) -> None:
        """Begin to count anew."""
        self.traffic = {peer: Traffic() for peer in self.peers}

    def latency(self, one: bytes, other: bytes) -> float:
        """Return the latency of a link [s]."""
        link = frozenset((one, other))
        if link not in self._latencies:
            self._latencies[link] = self.random.uniform(*self._range)
        return self._latencies[link]

    async def pass_on(self, source: bytes, target: bytes, size: int) -> None:
        """Wait until a message has passed.

        Raises:
            ConnectionError: The target refuses it.
        """
        self.traffic[source].add(size)
        seconds = self.latency(source, target) + self.queue_s
        while self.random.random() < self.loss:
            seconds += RESEND_S
        await asyncio.sleep(seconds)
        if self.cut(source, target) or {source, target} & self.silent:
            await asyncio.sleep(3600)
        if {source, target} & self.dead:
            raise ConnectionError("refused")
        self.traffic[target].add(size)


@dataclass(eq=False)
class SimulatedPeer:
    """One peer: its membership and its group formation."""

    network: Network
    peer_id: bytes
    client_mode: bool = False
    changes: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        own = Heartbeat(
            self.peer_id, loop.time(), 1, takes_part=True, client_mode=self.client_mode,
            spread=1, addresses=(ADDRESS, ADDRESS),
        )  # fmt: skip
        self.view = MembershipView(own, SILENCE_S, loop.time, straggler_timeout=60.0)
        self.caller = Caller(Protocol(self.view, loop.time, HEARTBEAT_S), self, self._follow)
        self.groups = GroupFormation(
            PeerID(self.peer_id), self.client_mode, schema_hash=b"s", key="k", ask=self._ask
        )
        self._members: Any = None
        self.network.peers[self.peer_id] = self
        self.network.traffic[self.peer_id] = Traffic()

    def start(self) -> None:
        """Begin to call."""
        self.tasks.append(asyncio.create_task(self.caller.run()))

    async def stop(self) -> None:
        """End all calls, as a process that is killed does."""
        for task in self.tasks:
            task.cancel()
        await self.caller.close()

    def announce(self, **fields: Any) -> None:
        """Announce a change of the own state to all."""
        self.view.announce(**fields)
        self.caller.announce()
        self._follow()

    def _follow(self) -> None:
        self.changes += 1
        members = self.view.members("averaged")
        if members != self._members:
            self._members = members
            self.groups.set_members(members)

    # -- its transport -----------------------------------------------------------------------------

    async def call(self, peer: bytes, message: bytes) -> bytes:
        await self.network.pass_on(self.peer_id, peer, len(message))
        answer = self.network.peers[peer].caller.receive(message)
        await self.network.pass_on(peer, self.peer_id, len(answer))
        return answer

    async def bring_back(self, peer: bytes, patience: float) -> None:
        await asyncio.wait_for(self.network.pass_on(self.peer_id, peer, 60), patience)

    async def _ask(self, leader: PeerID, request: Any) -> AsyncIterator[Any]:
        target = leader.to_bytes()
        await self.network.pass_on(self.peer_id, target, request.ByteSize())
        answers = self.network.peers[target].groups.rpc_join_group(request, PeerID(self.peer_id))
        return self._stream(target, answers)

    async def _stream(self, source: bytes, answers: Any) -> AsyncIterator[Any]:
        try:
            async for message in answers:
                await self.network.pass_on(source, self.peer_id, message.ByteSize())
                yield message
        finally:
            await answers.aclose()

    async def meet(self, round_: int) -> GroupInfo:
        """Form the group of a round with the other peers."""
        gathered = self.network.random.randbytes(GATHERED)
        group = await self.groups.meet(round_, gathered, 30.0, 60.0, 600.0)
        self.groups.leave_behind(round_)
        return group


class SimulatedSwarm:
    """Peers of one simulated network.

    Args:
        size: Number of peers.
        latency_s: Range of the latencies [s].
        loss: Share of the packets that are lost.
        seed: Seed of everything that is random.
        clients: Number of the peers that cannot be called.
    """

    def __init__(
        self,
        size: int,
        latency_s: tuple[float, float] = (0.005, 0.05),
        loss: float = 0.0,
        seed: int = 0,
        clients: int = 0,
    ) -> None:
        self.network = Network(latency_s, loss, seed)
        self.size, self.clients = size, clients
        self._count = 0

    @property
    def peers(self) -> list[SimulatedPeer]:
        """The live peers, the oldest first."""
        return [
            peer
            for peer in self.network.peers.values()
            if peer.peer_id not in self.network.dead | self.network.silent
        ]

    async def start(self, pause_s: float = 0.02) -> None:
        """Let the peers join one after the other, each at one that has joined."""
        for number in range(self.size):
            await self.join(client_mode=number >= self.size - self.clients)
            await asyncio.sleep(pause_s)

    async def join(self, client_mode: bool = False) -> SimulatedPeer:
        """Let one peer join."""
        known = [peer for peer in self.peers if not peer.client_mode]
        peer_id = b"\x12\x20" + self.network.random.randbytes(32)
        peer = SimulatedPeer(self.network, peer_id, client_mode)
        self._count += 1
        peer.start()
        if known:
            at = self.network.random.choice(known)
            await peer.caller.call(at.peer_id)
        return peer

    async def until(
        self, condition: Callable[[SimulatedPeer], bool], limit_s: float
    ) -> list[float]:
        """Wait until a condition holds for every live peer; return the time of each [s].

        Raises:
            AssertionError: It does not hold within ``limit_s``.
        """
        loop = asyncio.get_running_loop()
        began, times = loop.time(), dict[bytes, float]()
        seen = dict[bytes, int]()
        while len(times) < len(self.peers):
            for peer in self.peers:
                if peer.peer_id in times or seen.get(peer.peer_id) == peer.changes:
                    continue
                seen[peer.peer_id] = peer.changes
                if condition(peer):
                    times[peer.peer_id] = loop.time() - began
            if loop.time() - began > limit_s:
                missing = [p for p in self.peers if p.peer_id not in times]
                raise AssertionError(f"{len(missing)} of {len(self.peers)} after {limit_s} s")
            await asyncio.sleep(0.01)
        return [times[peer.peer_id] for peer in self.peers]

    async def all_known(self, limit_s: float = 30.0) -> list[float]:
        """Wait until every peer knows all live peers and no other."""
        live = {peer.peer_id for peer in self.peers}
        return await self.until(lambda peer: peer.view.alive_ids() == live, limit_s)

    async def end(self) -> None:
        """Stop all peers."""
        for peer in list(self.network.peers.values()):
            await peer.stop()
