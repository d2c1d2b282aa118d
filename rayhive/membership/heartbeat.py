"""Heartbeats between peers: the membership protocol over links and the network daemon.

Peers send state changes to each other instead of polling the DHT; the receivers follow from
:mod:`rayhive.membership.protocol`. The first contact is made through the DHT
(:mod:`rayhive.membership.discovery`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]
from hivemind.dht import DHT
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.utils import get_logger

from rayhive.membership.calls import Caller
from rayhive.membership.discovery import Dialer, Discovery
from rayhive.membership.event_loop import Notifier
from rayhive.membership.links.link import LinkLost
from rayhive.membership.peer_links import PeerLinks
from rayhive.membership.protocol import RETRY_FOR_S, Protocol
from rayhive.membership.view import MembershipView

logger = get_logger(__name__)

#: Longest goodbye [s].
GOODBYE_S = 0.5


class HeartbeatService:
    """Keeps one membership view up to date, on one event loop.

    Args:
        dht: A running DHT of the peer.
        prefix: Name of the run.
        view: The view.
        heartbeat: Interval between two heartbeats [s].
        expiration: How long an entry in the DHT is valid [s].
        on_change: Called whenever the view may have changed.
        links: Links for its calls; all calls go through the daemon without them, and to peers
            without a link.
    """

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        view: MembershipView,
        *,
        heartbeat: float,
        expiration: float,
        on_change: Callable[[], None],
        links: PeerLinks | None = None,
    ) -> None:
        self.view, self._dht = view, dht
        self._name = f"{prefix}.heartbeat"
        self._p2p: P2P
        arrivals = Notifier()
        self._dialer = Dialer(view, arrivals, heartbeat)
        protocol = Protocol(
            view, time.monotonic, heartbeat, forget_after=max(expiration, RETRY_FOR_S)
        )
        self._protocol, self._on_change, self._links = protocol, on_change, links
        self._caller = Caller(protocol, self, self._changed, _warn, arrivals)
        self._discovery = Discovery(
            dht,
            f"{prefix}_heartbeat",
            self._dialer,
            self._caller.call,
            expiration=expiration,
            patience=protocol.patience,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then say goodbye to the other peers.

        Raises:
            Exception: An error of ``on_change``, after which no heartbeat would be sent.
        """
        daemon = self._dht.run_coroutine(DHT._get_p2p_daemon_listen_maddr, return_future=True)
        self._p2p = await P2P.replicate(await daemon)
        self._dialer.daemon = self._p2p._client
        jobs: list[asyncio.Task[Any]] = []
        try:
            visible = await self._p2p.get_visible_maddrs()
            with self.view.lock:
                self.view.restate(addresses=tuple(map(str, visible)))
            self._caller.announce()
            if not self.view.own.client_mode:
                await self._p2p.add_protobuf_handler(self._name, self._answer, BytesValue)
            await self._open_links()
            endless = stop.wait, self._discovery.run, self._caller.run
            jobs = [asyncio.create_task(job()) for job in endless]
            done, _ = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for job in done:
                job.result()
            await self._say_goodbye()
            if not self.view.own.client_mode:
                await self._p2p.remove_protobuf_handler(self._name)
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)
            await self._caller.close()
            await self._dialer.close()
            if self._links is not None:
                await self._links.close()
            await self._p2p.shutdown()

    async def _open_links(self) -> None:
        if self._links is not None:
            await self._links.open(self._p2p, reply=lambda asked, _: self._caller.receive(asked))
            self._follow_neighbours()

    def _follow_neighbours(self) -> None:
        """Keep links to the live neighbours."""
        if self._links is not None:
            with self.view.lock:
                lost = self.view.lost()
                near = self._protocol.topology.lanes - lost
            self._links.set_members(near, lost)

    def _changed(self) -> None:
        self._follow_neighbours()
        self._on_change()

    def round_trip(self) -> float:
        """Return the longest round trip of the links; 0 without links [s]."""
        return 0.0 if self._links is None else self._links.round_trip()

    def announce(self) -> None:
        """Send this peer's state to all, because it has changed."""
        self._caller.announce()

    async def call(self, peer: bytes, message: bytes) -> bytes:
        """Send a message to a peer and return the answer."""
        link = None if self._links is None else self._links.ready(PeerID(peer))
        if link is not None:
            with contextlib.suppress(LinkLost):  # the daemon tells whether the peer is lost, too
                return await link.ask(message)
        answer = await self._p2p.call_protobuf_handler(
            PeerID(peer), self._name, BytesValue(value=message), BytesValue
        )
        answered: bytes = answer.value
        return answered

    async def bring_back(self, peer: bytes, patience: float) -> None:
        """Make sure that there is a connection to a peer that was given up."""
        await self._dialer.bring_back(peer, patience)

    async def _answer(self, request: BytesValue, context: P2PContext) -> BytesValue:
        return BytesValue(value=self._caller.receive(request.value))

    async def _say_goodbye(self) -> None:
        """Announce to all peers, and in the DHT, that this peer leaves."""
        last = asyncio.gather(
            self._discovery.declare(False), self._caller.say_goodbye(), return_exceptions=True
        )
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(last, GOODBYE_S)


def _warn(peer: bytes, error: Exception) -> None:
    logger.warning(f"going on without {PeerID(peer)}, no answer: {error!r}")
