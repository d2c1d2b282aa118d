"""Contact with peers: discovery through the DHT, and connections to lost and to unknown peers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hivemind.dht import DHT, DHTNode
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time, get_logger
from hivemind.utils.multiaddr import Multiaddr

from rayhive.membership.event_loop import Notifier, wait_at_most
from rayhive.membership.topology import SMALL_SWARM
from rayhive.membership.view import MembershipView

logger = get_logger(__name__)

#: Interval between two searches for unknown peers [s]: of a peer alone, and in a small swarm.
SEARCH_ALONE_S, SEARCH_S = 0.5, 5.0


async def probe(addresses: Iterable[str]) -> None:
    """Return if a listener accepts a connection at one of the addresses.

    It also returns if none of them can be tried: a relay accepts connections whether or not the
    peer behind it lives.

    Args:
        addresses: Multiaddresses of one peer.

    Raises:
        OSError: No address accepts a connection.
    """
    places = [address.split("/") for address in addresses]
    if any("p2p-circuit" in parts for parts in places):
        return
    plain = [parts for parts in places if parts[1:2] in (["ip4"], ["ip6"]) and parts[3] == "tcp"]
    error: OSError | None = None
    for parts in plain:
        try:
            _, writer = await asyncio.open_connection(parts[2], int(parts[4]))
        except OSError as failure:
            error = failure
            continue
        writer.close()
        return
    if error is not None:
        raise error


@dataclass
class Dialer:
    """Connects the network daemon to peers.

    The daemon doubles its pause after each failed dial. So a plain connection finds out first
    whether there is a route, and only one of two lost peers dials: both may fail if they dial at
    the same time.

    Attributes:
        view: The peer's membership view.
        arrivals: Notified when a peer has come or is back.
        grace: How long a peer waits for a lost one to call, beyond the patience of a call [s].
        probe: Raises ``OSError`` if no listener accepts connections at some addresses.
        daemon: The network daemon's client; set before the first call.
    """

    view: MembershipView
    arrivals: Notifier
    grace: float
    probe: Callable[[Iterable[str]], Awaitable[None]] = probe
    daemon: Any = None
    _connecting: dict[PeerID, asyncio.Task[None]] = field(default_factory=dict)

    async def bring_back(self, peer: bytes, patience: float) -> None:
        """Make sure that there is a connection to a peer that was given up.

        Args:
            peer: Its id.
            patience: Longest time of each attempt [s].

        Raises:
            OSError: There is no route.
            asyncio.TimeoutError: The daemon does not connect.
        """
        if not await self.has_returned(peer, patience):
            await asyncio.wait_for(self.reconnect(peer), patience)

    async def has_returned(self, peer: bytes, patience: float) -> bool:
        """Return whether a peer that was given up has called, as it does if it is to dial.

        Of two peers, the one with the smaller id dials; a client always does.

        Args:
            peer: Its id.
            patience: Longest time of the probe [s].

        Raises:
            OSError: There is no route.
        """
        if peer in self.view.alive_ids():
            return True
        with self.view.lock:
            own, addresses = self.view.own, self.view.addresses_of(peer)
        try:
            await asyncio.wait_for(self.probe(addresses), patience)
        except (OSError, asyncio.TimeoutError):
            if peer not in self.view.alive_ids():
                await self.hang_up(peer)
            raise
        deadline = time.monotonic() + patience + self.grace
        while True:
            arrival = self.arrivals.next_change()
            if peer in self.view.alive_ids():
                return True
            left = deadline - time.monotonic()
            if own.client_mode or own.peer_id < peer or left <= 0:
                return False
            await wait_at_most(arrival, left)

    async def hang_up(self, peer: bytes) -> None:
        """Close the rest of the connection to a peer that was given up.

        The daemon may take minutes to notice that a link is back, and would go on to use the old
        connection beside a new one.
        """
        with contextlib.suppress(Exception):  # there is no connection any more
            await self.daemon.disconnect(PeerID(peer))

    async def reconnect(self, peer: bytes) -> None:
        """Replace the connection to a peer that was given up."""
        with self.view.lock:
            addresses = self.view.addresses_of(peer)
        await self.hang_up(peer)
        await self.connect(PeerID(peer), addresses)

    async def connect(self, peer: PeerID, addresses: Sequence[str]) -> None:
        """Connect the daemon to a peer; a second call meanwhile waits for the same answer.

        A stopped peer accepts a connection and never answers. Each request to the daemon holds a
        socket until there is an answer, also after the request was given up.
        """
        connecting = self._connecting.get(peer)
        if connecting is None or connecting.done():
            places = [Multiaddr(_without_id(address, peer)) for address in addresses]
            connecting = asyncio.ensure_future(self.daemon.connect(peer, places))
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._connecting[peer] = connecting
        await asyncio.shield(connecting)

    async def close(self) -> None:
        """Cancel all requests."""
        requests = list(self._connecting.values())
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)


def _without_id(address: str, peer: PeerID) -> str:
    """Return an address of a peer without the peer's own id; a relay's id in it stays."""
    return address.removesuffix(f"/p2p/{peer}")


@dataclass(frozen=True)
class Discovery:
    """Keeps a peer's entry in the DHT, and calls the peers that it finds there.

    Attributes:
        dht: A running DHT of the peer.
        key: Key of the run's entries.
        dialer: Connects to peers that are known by address only. When one of its arrivals is
            notified, the next search begins at once.
        call: Sends this peer's heartbeat to a peer and receives the answer.
        expiration: How long an entry in the DHT is valid [s].
        patience: Longest time of a call [s].
    """

    dht: DHT
    key: str
    dialer: Dialer
    call: Callable[[bytes], Awaitable[None]]
    expiration: float
    patience: float

    async def run(self) -> None:
        """Renew the entry and search for peers until cancelled."""
        declared = -float("inf")
        while True:
            arrival = self.dialer.arrivals.next_change()  # an arrival during the search counts, too
            try:
                if get_dht_time() - declared > self.expiration / 3:
                    declared = get_dht_time()
                    await self.declare(True)
                await self.search()
                await self._search_initial_peers()
                await self._merge_networks()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.debug(f"could not look for peers: {error!r}")
            await wait_at_most(arrival, search_pause(len(self.dialer.view.alive_ids())))

    async def declare(self, takes_part: bool) -> None:
        """Write this peer's entry."""
        await self.dht.store(
            self.key,
            subkey=self.dialer.view.own.peer_id,
            value=takes_part,
            expiration_time=get_dht_time() + self.expiration,
            return_future=True,
        )

    async def search(self) -> None:
        """Call the peers whose entries are in the DHT and that are not known yet.

        Lost peers are left to the :class:`Dialer`: a dial in vain would delay the next one beyond
        the return of the link.
        """
        view = self.dialer.view
        found = await self.dht.get(self.key, latest=True, return_future=True)
        entries = getattr(found, "value", None)
        for peer, entry in entries.items() if isinstance(entries, dict) else ():
            if entry.value and view.find(peer) is None:
                with contextlib.suppress(Exception):  # an entry outlives its peer
                    await asyncio.wait_for(self.call(peer), view.silence)

    async def _search_initial_peers(self) -> None:
        """Call the peers at whose addresses this peer was to join: they may take part, too.

        Peers that began with the same list of addresses may be in two networks that do not know
        each other.
        """
        alive = self.dialer.view.alive_ids()
        for address in map(str, self.dht.initial_peers or ()):
            peer = PeerID.from_base58(address.rpartition("/p2p/")[2])
            if peer.to_bytes() in alive or peer == self.dht.peer_id:
                continue
            with contextlib.suppress(Exception):  # it may be long gone
                await asyncio.wait_for(self.dialer.probe([address]), self.patience)
                await asyncio.wait_for(self.dialer.connect(peer, [address]), self.patience)
                await asyncio.wait_for(self.call(peer.to_bytes()), self.patience)

    async def _merge_networks(self) -> None:
        """Introduce live peers to the DHT, which a partition may have split in two."""
        peers = sorted(self.dialer.view.alive_ids() - {self.dialer.view.own.peer_id})
        peers = random.sample(peers, min(SMALL_SWARM, len(peers)))
        introduction = self.dht.run_coroutine(partial(_introduce, peers), return_future=True)
        await asyncio.wait_for(introduction, self.dialer.view.silence)


def search_pause(alive: int) -> float:
    """Return the time between two searches [s].

    The answer of a search grows with the swarm, so a large swarm searches less often.

    Args:
        alive: Number of live peers, this one included.
    """
    return SEARCH_ALONE_S if alive == 1 else SEARCH_S * max(1.0, alive / SMALL_SWARM)


async def _introduce(peers: list[bytes], dht: DHT, node: DHTNode) -> None:
    """Ping the peers that the DHT does not know: both sides add each other. Runs in the DHT."""
    known = node.protocol.routing_table.peer_id_to_uid
    missing = [PeerID(peer) for peer in peers if PeerID(peer) not in known]
    await asyncio.gather(*(node.protocol.call_ping(peer) for peer in missing))
