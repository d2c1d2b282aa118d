"""Discovery of peers through the DHT, before they know each other directly."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

from hivemind.dht import DHT, DHTNode
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time, get_logger

from rayhive.membership.dialer import Dialer
from rayhive.membership.notifier import Notifier, wait_at_most
from rayhive.membership.view import MembershipView

logger = get_logger(__name__)

#: Interval between two searches for unknown peers [s]: of a peer alone, and of one with company.
SEARCH_ALONE_S, SEARCH_S = 0.5, 5.0


class Discovery:
    """Keeps a peer's entry in the DHT, and calls the peers that it finds there.

    Args:
        dht: A running DHT of the peer.
        key: Key of the run's entries.
        view: The peer's membership view.
        dialer: Connects to peers that are known by address only.
        arrivals: Notified when a peer has come; the next search begins at once.
        call: Sends this peer's heartbeat to a peer and receives the answer.
        expiration: How long an entry in the DHT is valid [s].
        patience: Longest time of a call [s].
    """

    def __init__(
        self,
        dht: DHT,
        key: str,
        view: MembershipView,
        dialer: Dialer,
        arrivals: Notifier,
        call: Callable[[bytes], Awaitable[None]],
        *,
        expiration: float,
        patience: float,
    ) -> None:
        self._dht, self._key, self._view = dht, key, view
        self._dialer, self._arrivals, self._call = dialer, arrivals, call
        self._expiration, self._patience = expiration, patience

    async def run(self) -> None:
        """Renew the entry and search for peers until cancelled."""
        declared = -float("inf")
        while True:
            arrival = self._arrivals.next_change()  # an arrival during the search counts, too
            try:
                if get_dht_time() - declared > self._expiration / 3:
                    declared = get_dht_time()
                    await self.declare(True)
                await self.search()
                await self._search_initial_peers()
                await self._merge_networks()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.debug(f"could not look for peers: {error!r}")
            alone = len(self._view.alive_ids()) == 1
            await wait_at_most(arrival, SEARCH_ALONE_S if alone else SEARCH_S)

    async def declare(self, takes_part: bool) -> None:
        """Write this peer's entry."""
        await self._dht.store(
            self._key,
            subkey=self._view.own.peer_id,
            value=takes_part,
            expiration_time=get_dht_time() + self._expiration,
            return_future=True,
        )

    async def search(self) -> None:
        """Call the peers whose entries are in the DHT and that are not known yet.

        Lost peers are left to the :class:`Dialer`: a dial in vain would delay the next one beyond
        the return of the link.
        """
        found = await self._dht.get(self._key, latest=True, return_future=True)
        entries = getattr(found, "value", None)
        for peer, entry in entries.items() if isinstance(entries, dict) else ():
            if entry.value and peer != self._view.own.peer_id and not self._view.knows(peer):
                with contextlib.suppress(Exception):  # an entry outlives its peer
                    await asyncio.wait_for(self._call(peer), self._view.silence)

    async def _search_initial_peers(self) -> None:
        """Call the peers at whose addresses this peer was to join: they may take part, too.

        Peers that began with the same list of addresses may be in two networks that do not know
        each other.
        """
        alive = self._view.alive_ids()
        for address in map(str, self._dht.initial_peers or ()):
            peer = PeerID.from_base58(address.rpartition("/p2p/")[2])
            if peer.to_bytes() in alive or peer == self._dht.peer_id:
                continue
            with contextlib.suppress(Exception):  # it may be long gone
                await asyncio.wait_for(self._dialer.probe([address]), self._patience)
                await asyncio.wait_for(self._dialer.connect(peer, [address]), self._patience)
                await asyncio.wait_for(self._call(peer.to_bytes()), self._patience)

    async def _merge_networks(self) -> None:
        """Introduce all live peers to the DHT, which a partition may have split in two."""
        peers = sorted(self._view.alive_ids() - {self._view.own.peer_id})
        introduction = self._dht.run_coroutine(partial(_introduce, peers), return_future=True)
        await asyncio.wait_for(introduction, self._view.silence)


async def _introduce(peers: list[bytes], dht: DHT, node: DHTNode) -> None:
    """Ping the peers that the DHT does not know: both sides add each other. Runs in the DHT."""
    known = node.protocol.routing_table.peer_id_to_uid
    missing = [PeerID(peer) for peer in peers if PeerID(peer) not in known]
    await asyncio.gather(*(node.protocol.call_ping(peer) for peer in missing))
