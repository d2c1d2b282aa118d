"""DHT of a peer, from joining the swarm to leaving it, and the clock of its entries."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import hivemind
from hivemind.p2p import P2P, PeerID
from hivemind.utils import timed_storage
from hivemind.utils.multiaddr import Multiaddr

from rayhive.errors import PeerError, Problem
from rayhive.membership.addresses import join_message, reachable, same_command, tcp_address
from rayhive.membership.daemon_calls import keep_answering
from rayhive.optim.child_processes import ChildProcesses
from rayhive.strategy.arguments import StrategyError

log = logging.getLogger("rayhive.peer")

#: Environment variable of libp2p: whether it dials from the port on which it listens.
REUSE_PORT = "LIBP2P_TCP_REUSEPORT"
#: Longest wait for an entry of the DHT [s].
_DHT_TIMEOUT = 10.0
#: Longest time to connect to a peer and to exchange greetings [s].
_MEETING_TIMEOUT = 15.0
#: Longest wait for the list of neighbours, which only a second fit needs [s].
_NEIGHBOURS_TIMEOUT = 1.0


class SwarmDHT:
    """DHT of a strategy, which it starts itself or was given.

    Args:
        run_id: The name of the run.
        dht: A running DHT, which its owner ends; None to start one.
        peers: Addresses to join at; None to begin a swarm.
        arguments: Settings for a DHT that is started here.

    Attributes:
        dht: The DHT.
        is_first: Whether no other peer shared a state when this one joined.
        round_at_join: Newest round of a state that another peer shared then; 0 after the first fit.

    Raises:
        StrategyError: An address is malformed, or the given DHT does not run.
        PeerError: No peer answers at the addresses, or all peers died while this one joined.
    """

    def __init__(
        self,
        run_id: str,
        dht: hivemind.DHT | None,
        peers: Sequence[str] | None,
        arguments: Mapping[str, Any],
    ) -> None:
        self._run_id, self._children = run_id, ChildProcesses()
        self._given, self._peers, self._arguments = dht, peers, dict(arguments)
        self._neighbours: list[str] = []
        self._finalizer: weakref.finalize[..., Any] | None = None
        self.dht: hivemind.DHT = dht
        self.join()
        joins = dht is not None or peers or arguments.get("use_ipfs")
        shared = self._rounds_at_join() if joins else {}
        self.is_first = not shared
        self.round_at_join = self._newest_of_others(shared) or 0

    def join(self) -> None:
        """Start the DHT unless it runs. After :meth:`leave`, rejoin at the former neighbours."""
        if self._given is not None:
            if not self._given.is_alive():
                raise StrategyError.about("dht", "a DHT that has ended", "a running DHT")
            return
        if self._finalizer is not None and self._finalizer.alive:
            return
        self.dht = self._start()
        self._finalizer = weakref.finalize(self, _end, self._children, self.dht, os.getpid())
        self._announce()

    def _start(self) -> hivemind.DHT:
        keep_answering()
        known = list(dict.fromkeys([*(self._peers or ()), *self._neighbours]))
        try:
            return self._children.start_dht(initial_peers=known or None, **self._arguments)
        except Exception as error:
            if known and not self._peers:
                log.warning("no peer of the last fit is left: beginning a new swarm")
                return self._children.start_dht(initial_peers=None, **self._arguments)
            allowed = "an address as another peer prints it: /ip4/HOST/tcp/PORT/p2p/ID"
            wrong = [
                Problem("initial_peers", item, allowed) for item in known if not _readable(item)
            ]
            if wrong:
                raise StrategyError(wrong) from error
            where = ", ".join(known) or "any relay"
            raise PeerError(f"could not join the swarm at {where}: {error}") from error

    def _announce(self) -> None:
        command = same_command(sys.orig_argv, sys.argv)
        message = join_message(self._run_id, self.addresses, command)
        log.info(message)
        if not self._peers:
            print(message, flush=True)

    @property
    def addresses(self) -> list[str]:
        """Addresses at which other machines can join; loopback addresses if there are no others."""
        return reachable(self.dht.get_visible_maddrs())

    def newest_shared_round(self) -> int | None:
        """Return the newest round of a state that another peer shares; None if none does."""
        return self._newest_of_others(self._shared_rounds())

    def _newest_of_others(self, shared: Mapping[bytes, float]) -> int | None:
        own = self.dht.peer_id.to_bytes()
        rounds = [round_ for peer, round_ in shared.items() if peer != own]
        return int(max(rounds)) if rounds else None

    def _rounds_at_join(self) -> dict[bytes, float]:
        """Return the round of each peer that shares its state, as known when this one joined.

        Raises:
            PeerError: All peers died meanwhile. Without them this peer would begin anew a run that
                they may have trained.
        """
        starts = self._given is None and self._peers
        met = self.dht.run_coroutine(_acquaintances) if starts else []
        shared = self._shared_rounds()
        if met and not shared and not self.dht.run_coroutine(partial(_any_answers, met)):
            self.leave()
            raise PeerError(f"the peers at {', '.join(starts or ())} died while this one joined")
        return shared

    def _shared_rounds(self) -> dict[bytes, float]:
        """Return the round of each peer that shares its state."""
        key = f"{self._run_id}_state_averager.all_averagers"
        try:
            answer = self.dht.get(key, latest=True, return_future=True).result(_DHT_TIMEOUT)
        except Exception as error:
            log.warning(f"could not read the peers of the run from the DHT: {error!r}")
            return {}
        entries = getattr(answer, "value", None)
        if not isinstance(entries, dict):
            return {}
        found = {peer: getattr(entry, "value", None) for peer, entry in entries.items()}
        return {peer: value for peer, value in found.items() if isinstance(value, (int, float))}

    def leave(self) -> None:
        """End the DHT if it was started here; calling it again does nothing."""
        self.round_at_join = 0  # the module keeps what it has learned
        if self._finalizer is None or not self._finalizer.alive:
            return
        with contextlib.suppress(Exception):
            future = self.dht.run_coroutine(_neighbours, return_future=True)
            self._neighbours = future.result(timeout=_NEIGHBOURS_TIMEOUT)
        self._finalizer()


class SkewedClock:
    """Replacement of hivemind's DHT clock with an adjustable offset.

    It has to be installed before any process of the peer is forked.
    """

    def __init__(self) -> None:
        self._offset = multiprocessing.get_context("fork").RawValue(ctypes.c_double, 0.0)

    def __call__(self) -> float:
        """Return this peer's time [s]."""
        return time.time() + float(self._offset.value)

    def install(self) -> None:
        """Replace ``get_dht_time`` in all loaded modules."""
        replaced = timed_storage.get_dht_time
        for module in list(sys.modules.values()):
            if getattr(module, "get_dht_time", None) is replaced:
                module.get_dht_time = self  # type: ignore[attr-defined]

    def set(self, seconds: float) -> dict[str, float]:
        """Set the offset; return the measured offsets before and after [s]."""
        before = timed_storage.get_dht_time() - time.time()
        self._offset.value = seconds
        return {"off_before_s": before, "off_after_s": timed_storage.get_dht_time() - time.time()}


def dial_from_own_ports() -> None:
    """Let network daemons that are started from now on dial from ports of their own.

    libp2p dials from the port on which it listens. When two peers dial each other within a round
    trip, TCP then makes one connection of both (RFC 9293, section 3.5, simultaneous open) of which
    both think that they began it: the handshake fails, and the daemons refuse to dial again for
    seconds. A peer behind a firewall needs the common port, and so does one that rejoins at its
    former neighbours. A value that is set already stays.
    """
    os.environ.setdefault(REUSE_PORT, "false")


def start_on_host(host: str) -> hivemind.DHT:
    """Start a DHT that knows nobody yet, with its sockets in the temporary directory.

    Args:
        host: IPv4 or IPv6 address to listen on.
    """
    dial_from_own_ports()
    # The sockets are removed together with the peer's temporary directory.
    P2P._UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/hivemind-"
    return hivemind.DHT(host_maddrs=[tcp_address(host)], use_relay=False, start=True)


def meet(dht: hivemind.DHT, addresses: Sequence[str]) -> None:
    """Let a running DHT that knows nobody join the swarm of other peers.

    Args:
        dht: The DHT.
        addresses: Addresses of the peers; empty to begin a swarm.

    Raises:
        PeerError: No peer answers at the addresses.
    """
    if not addresses:
        return
    places: dict[str, list[str]] = {}
    for address in addresses:
        place, _, peer = address.rpartition("/p2p/")
        places.setdefault(peer, []).append(place)
    try:
        dht.run_coroutine(partial(_meet, places))
    except Exception as error:
        where = ", ".join(addresses)
        raise PeerError(f"could not join the swarm at {where}: {error}") from error


async def _meet(places: Mapping[str, Sequence[str]], dht: hivemind.DHT, node: Any) -> None:
    """Connect to peers and enter each other's routing tables; runs in the DHT."""

    async def greet(peer: PeerID, maddrs: list[Multiaddr]) -> None:
        await node.protocol.p2p._client.connect(peer, maddrs)
        if await node.protocol.call_ping(peer, validate=True, strict=True) is None:
            raise PeerError(f"{peer} does not answer")

    greetings = [
        asyncio.wait_for(
            greet(PeerID.from_base58(peer), [Multiaddr(text) for text in texts]), _MEETING_TIMEOUT
        )
        for peer, texts in places.items()
    ]
    failed = [each for each in await asyncio.gather(*greetings, return_exceptions=True) if each]
    if len(failed) == len(greetings):
        raise failed[0]
    looking = asyncio.ensure_future(node.find_nearest_nodes([node.node_id]))
    await asyncio.wait([looking], timeout=node.protocol.wait_timeout)


async def _acquaintances(dht: hivemind.DHT, node: Any) -> list[PeerID]:
    """Return the peers in the routing table; runs in the DHT."""
    return list(node.protocol.routing_table.peer_id_to_uid)


async def _any_answers(peers: Sequence[PeerID], dht: hivemind.DHT, node: Any) -> bool:
    """Return whether any of some peers answers; runs in the DHT."""
    answers = await asyncio.gather(*(node.protocol.call_ping(peer) for peer in peers))
    return any(answer is not None for answer in answers)


async def _neighbours(dht: hivemind.DHT, node: Any) -> list[str]:
    """Return the addresses of the peers that this one is connected to; runs in the DHT."""
    peers = await node.protocol.p2p.list_peers()
    return [f"{address}/p2p/{peer.peer_id}" for peer in peers for address in peer.addrs]


def _readable(address: str) -> bool:
    try:
        Multiaddr(address)
    except Exception:  # the parser documents no errors
        return False
    return True


def _end(children: ChildProcesses, dht: hivemind.DHT, owner: int) -> None:
    if os.getpid() == owner:  # forks inherit the finalizer
        children.end_dht(dht)
