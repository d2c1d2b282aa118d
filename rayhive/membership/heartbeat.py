"""Peers tell each other what they do, directly: nobody looks, and nobody waits for a next look.

Every peer keeps calling every other: at once when it has news that matter, and as a sign of life
otherwise. The answer holds all that the other knows, so a newcomer that reaches one peer knows
everybody. A peer that does not answer twice in a row, or is silent for too long, is taken for dead
until it is heard of again. The DHT is where peers find each other first.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]
from hivemind.dht import DHT, DHTNode
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time, get_logger
from hivemind.utils.multiaddr import Multiaddr

from rayhive.membership.view import Heartbeat, MembershipView

logger = get_logger(__name__)

#: Between two looks into the DHT for peers that are not known yet [s]: alone, and in company.
LOOK_ALONE_S, LOOK_S = 0.5, 5.0
#: Calls that fail in a row before a peer is taken for dead.
FAILURES = 2
#: Between two calls of a peer that cannot be called [s].
CLIENT_PAUSE_S = 0.1
#: Longest goodbye [s].
GOODBYE_S = 0.5
#: How long a peer that is gone without a word is looked for [s]; the link may be cut for so long.
LOOKED_FOR_S = 3600.0
#: After so long it is looked for less often, by this factor [s].
SELDOM_AFTER_S, SELDOM = 600.0, 5


class HeartbeatService:
    """Keeps one view up to date; everything happens on one event loop.

    Args:
        dht: A running DHT of the peer.
        prefix: Name of the run.
        view: What is kept up to date.
        heartbeat: Between two signs of life [s].
        expiration: How long an entry in the DHT is valid [s].
        on_change: Called whenever the view may have changed.
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
    ) -> None:
        self.view, self._dht, self._on_change = view, dht, on_change
        self._name, self._key = f"{prefix}.heartbeat", f"{prefix}_heartbeat"
        self._heartbeat, self._expiration = heartbeat, expiration
        self._p2p: P2P
        self._calls: dict[bytes, asyncio.Task[None]] = {}
        self._news: dict[bytes, asyncio.Event] = {}
        self._connecting: dict[PeerID, asyncio.Task[None]] = {}
        self._arrival = asyncio.Event()  # another one each time that somebody comes

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then say goodbye."""
        self._p2p = await P2P.replicate(await self._daemon())
        jobs = []
        try:
            visible = await self._p2p.get_visible_maddrs()
            with self.view.lock:
                own = self.view.own
                self.view.own = replace(own, addresses=tuple(map(str, visible)))
            if not self.view.own.client_mode:
                await self._p2p.add_protobuf_handler(self._name, self._answer, BytesValue)
            jobs = [asyncio.create_task(job()) for job in (self._meet, self._watch)]
            await stop.wait()
            await self._say_goodbye()
            if not self.view.own.client_mode:
                await self._p2p.remove_protobuf_handler(self._name)
        finally:
            tasks = [*jobs, *self._calls.values(), *self._connecting.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._p2p.shutdown()

    async def _daemon(self) -> Any:
        return await self._dht.run_coroutine(DHT._get_p2p_daemon_listen_maddr, return_future=True)

    def tell(self) -> None:
        """Call everybody who is here now: there are news of this peer."""
        for peer in self._present() & self._news.keys():
            self._news[peer].set()

    # -- calls ---------------------------------------------------------------------------------

    async def _answer(self, request: BytesValue, context: P2PContext) -> BytesValue:
        self._take_in(request)
        with self.view.lock:
            return self._letter(self.view.told())

    @staticmethod
    def _letter(content: list[Any]) -> BytesValue:
        return BytesValue(value=MSGPackSerializer.dumps(content))

    def _take_in(self, letter: BytesValue) -> None:
        with self.view.lock:
            before = len(self.view.present())
            for fields, age, idle in MSGPackSerializer.loads(letter.value):
                heartbeat = Heartbeat.unpack(fields)
                if self.view.hear(heartbeat, age, idle) and not self.view.is_here(
                    heartbeat.peer_id
                ):
                    self._call_at_once(heartbeat.peer_id)
            if len(self.view.present()) > before:
                arrival, self._arrival = self._arrival, asyncio.Event()
                arrival.set()
            self._start_calls()
        self._on_change()

    def _call_at_once(self, peer: bytes) -> None:
        if peer in self._news:
            self._news[peer].set()

    def _start_calls(self) -> None:
        for heartbeat in self.view.others():
            if heartbeat.client_mode:
                continue
            peer = heartbeat.peer_id
            if peer not in self._calls or self._calls[peer].done():
                self._news[peer] = asyncio.Event()
                self._calls[peer] = asyncio.create_task(self._keep_calling(peer))

    async def _keep_calling(self, peer: bytes) -> None:
        """Call a peer for as long as it is known: at news, and as a sign of life."""
        failures, news = 0, self._news[peer]
        last = time.monotonic()
        while self._knows(peer):
            news.clear()
            lost_s = time.monotonic() - last
            try:
                patience = self.view.silence / FAILURES
                if failures >= FAILURES and not await self._is_back(peer, patience):
                    await asyncio.wait_for(self._reconnect(peer), patience)
                await asyncio.wait_for(self._call(peer), patience)
                failures, last = 0, time.monotonic()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                failures += 1
                if failures == FAILURES:
                    logger.warning(f"going on without {PeerID(peer)}, no answer: {error!r}")
                    with self.view.lock:
                        self.view.give_up(peer)
                    self._on_change()
                if failures < FAILURES:
                    continue
            # what others have to say, a client hears when it calls
            pause = CLIENT_PAUSE_S if self.view.own.client_mode else self._heartbeat
            if lost_s > SELDOM_AFTER_S:
                pause *= SELDOM
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news.wait(), pause)

    async def _is_back(self, peer: bytes, patience: float) -> bool:
        """Return whether a peer that was given up has come back by itself.

        A daemon that has dialled in vain waits longer each time before it dials again. So it is a
        plain connection that finds out whether there is a way; and then one of the two dials and
        the other waits to be called, as both may fail if they dial at the same time.

        Raises:
            OSError: There is no way yet.
        """
        if self._is_here(peer):
            return True
        with self.view.lock:
            own, addresses = self.view.own, self.view.addresses_of(peer)
        try:
            await asyncio.wait_for(_knock(addresses), patience)
        except (OSError, asyncio.TimeoutError):
            if not self._is_here(peer):
                await self._hang_up(peer)
            raise
        ends = time.monotonic() + patience + self._heartbeat
        while not self._is_here(peer):
            left = ends - time.monotonic()
            if own.client_mode or own.peer_id < peer or left <= 0:
                return False
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), left)
        return True

    async def _hang_up(self, peer: bytes) -> None:
        """End what is left of the connection to a peer that was given up.

        It may wait for minutes until it notices that the link is there again, and the daemon would
        go on using it beside a new one.
        """
        with contextlib.suppress(Exception):  # there is none any more
            await self._p2p._client.disconnect(PeerID(peer))

    async def _reconnect(self, peer: bytes) -> None:
        """Make a new connection to a peer that was given up."""
        with self.view.lock:
            addresses = self.view.addresses_of(peer)
        await self._hang_up(peer)
        await self._connect(PeerID(peer), addresses)

    async def _connect(self, peer: PeerID, addresses: Sequence[str]) -> None:
        """Have the daemon connect to a peer; who asks again meanwhile waits for the same answer.

        One that is stopped is connected to and never says a word. Each request to the daemon has a
        socket, which is not closed before there is an answer, whoever has given it up.
        """
        connecting = self._connecting.get(peer)
        if connecting is None or connecting.done():
            places = [Multiaddr(_without_id(address, peer)) for address in addresses]
            connecting = asyncio.ensure_future(self._p2p._client.connect(peer, places))
            connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._connecting[peer] = connecting
        await asyncio.shield(connecting)

    def _knows(self, peer: bytes) -> bool:
        with self.view.lock:
            return any(other.peer_id == peer for other in self.view.others())

    def _is_here(self, peer: bytes) -> bool:
        with self.view.lock:
            return self.view.is_here(peer)

    def _present(self) -> set[bytes]:
        with self.view.lock:
            return {heartbeat.peer_id for heartbeat in self.view.present()}

    async def _call(self, peer: bytes) -> None:
        with self.view.lock:
            letter = self._letter([self.view.told_of_own()])
        answer = await self._p2p.call_protobuf_handler(PeerID(peer), self._name, letter, BytesValue)
        self._take_in(answer)

    async def _watch(self) -> None:
        """Notice silence, which is no event."""
        while True:
            await asyncio.sleep(self._heartbeat / 2)
            with self.view.lock:
                self.view.note_losses()
                self.view.forget(max(self._expiration, LOOKED_FOR_S))
            self._on_change()

    # -- the DHT -------------------------------------------------------------------------------

    async def _meet(self) -> None:
        """Be found in the DHT, and look there for peers that are not known yet."""
        declared = -float("inf")
        while True:
            arrival = self._arrival  # who comes while this peer looks counts, too
            try:
                if get_dht_time() - declared > self._expiration / 3:
                    declared = get_dht_time()
                    await self._declare(True)
                await self._look()
                await self._look_where_it_began()
                await self._merge()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.debug(f"could not look for peers: {error!r}")
            alone = len(self._present()) == 1
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(arrival.wait(), LOOK_ALONE_S if alone else LOOK_S)

    async def _declare(self, here: bool) -> None:
        await self._dht.store(
            self._key,
            subkey=self.view.own.peer_id,
            value=here,
            expiration_time=get_dht_time() + self._expiration,
            return_future=True,
        )

    async def _look(self) -> None:
        """Call those whom nobody has told of yet.

        Who was lost is looked for otherwise: the daemon would dial it in vain, and so would not
        dial it for a while once the link is back.
        """
        found = await self._dht.get(self._key, latest=True, return_future=True)
        entries = getattr(found, "value", None)
        for peer, entry in entries.items() if isinstance(entries, dict) else ():
            if entry.value and peer != self.view.own.peer_id and not self._knows(peer):
                with contextlib.suppress(Exception):  # an entry outlives its peer
                    await asyncio.wait_for(self._call(peer), self.view.silence)

    async def _look_where_it_began(self) -> None:
        """Call those at whom this peer has joined, or was to join: they may be in the run, too.

        Peers that began with the same list of addresses may stand in two networks that do not
        know each other.
        """
        present = self._present()
        for address in map(str, self._dht.initial_peers or ()):
            peer = PeerID.from_base58(address.rpartition("/p2p/")[2])
            if peer.to_bytes() in present or peer == self._dht.peer_id:
                continue
            with contextlib.suppress(Exception):  # it may be long gone
                patience = self.view.silence / FAILURES
                await asyncio.wait_for(_knock([address]), patience)
                await asyncio.wait_for(self._connect(peer, [address]), patience)
                await asyncio.wait_for(self._call(peer.to_bytes()), patience)

    async def _merge(self) -> None:
        """Let the DHT know everybody whom this peer knows: a cut link may have made two of it."""
        peers = sorted(self._present() - {self.view.own.peer_id})
        meeting = self._dht.run_coroutine(partial(_make_known, peers), return_future=True)
        await asyncio.wait_for(meeting, self.view.silence)

    async def _say_goodbye(self) -> None:
        """Tell everybody that this peer takes part no more."""
        calls = [self._call(peer) for peer, task in self._calls.items() if not task.done()]
        last = asyncio.gather(self._declare(False), *calls, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(last, GOODBYE_S)


async def _make_known(peers: list[bytes], dht: DHT, node: DHTNode) -> None:
    """Ping those that the DHT does not know, which makes both know each other; runs in the DHT."""
    known = node.protocol.routing_table.peer_id_to_uid
    missing = [PeerID(peer) for peer in peers if PeerID(peer) not in known]
    await asyncio.gather(*(node.protocol.call_ping(peer) for peer in missing))


async def _knock(addresses: Sequence[str]) -> None:
    """Return if somebody listens at one of the addresses, or if that cannot be seen.

    It cannot where a relay is on the way: that the relay listens says nothing of the peer.

    Raises:
        OSError: Nobody does.
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


def _without_id(address: str, peer: PeerID) -> str:
    """Return an address of a peer without the peer's own ID; that of a relay on the way stays."""
    return address.removesuffix(f"/p2p/{peer}")
