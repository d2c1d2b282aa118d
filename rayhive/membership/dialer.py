"""Connections to peers that were lost, and to peers that are known by address only."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from rayhive.membership.notifier import Notifier, wait_at_most
from rayhive.membership.view import MembershipView


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


class Dialer:
    """Connects the network daemon to peers.

    The daemon doubles its pause after each failed dial. So a plain connection finds out first
    whether there is a route, and only one of two lost peers dials: both may fail if they dial at
    the same time.

    Args:
        view: The peer's membership view.
        arrivals: Notified when a peer has come or is back.
        grace: How long a peer waits for a lost one to call, beyond the patience of a call [s].
        probe: Raises ``OSError`` if no listener accepts connections at some addresses.
    """

    def __init__(
        self,
        view: MembershipView,
        arrivals: Notifier,
        grace: float,
        probe: Callable[[Iterable[str]], Awaitable[None]] = probe,
    ) -> None:
        self._view, self._arrivals, self._grace = view, arrivals, grace
        self.probe = probe
        #: The network daemon's client; set before the first call.
        self.daemon: Any = None
        self._connecting: dict[PeerID, asyncio.Task[None]] = {}

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
        if self._is_alive(peer):
            return True
        with self._view.lock:
            own, addresses = self._view.own, self._view.addresses_of(peer)
        try:
            await asyncio.wait_for(self.probe(addresses), patience)
        except (OSError, asyncio.TimeoutError):
            if not self._is_alive(peer):
                await self.hang_up(peer)
            raise
        deadline = time.monotonic() + patience + self._grace
        while True:
            arrival = self._arrivals.next_change()
            if self._is_alive(peer):
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
        with self._view.lock:
            addresses = self._view.addresses_of(peer)
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

    def _is_alive(self, peer: bytes) -> bool:
        with self._view.lock:
            return self._view.is_alive(peer)


def _without_id(address: str, peer: PeerID) -> str:
    """Return an address of a peer without the peer's own id; a relay's id in it stays."""
    return address.removesuffix(f"/p2p/{peer}")
