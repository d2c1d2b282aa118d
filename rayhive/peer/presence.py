"""Peers tell each other what they do, directly: nobody looks, and nobody waits for a next look.

Every peer keeps calling every other: at once when it has news that matter, and as a sign of life
otherwise. The answer holds all that the other knows, so a newcomer that reaches one peer knows
everybody. A peer that does not answer twice in a row, or is silent for too long, is taken for dead
until it is heard of again. The DHT is where peers find each other first.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]
from hivemind.dht import DHT
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.utils import MSGPackSerializer, get_dht_time, get_logger

from rayhive.peer.census import Census, Presence

logger = get_logger(__name__)

#: Between two looks into the DHT for peers that are not known yet [s]: alone, and in company.
LOOK_ALONE_S, LOOK_S = 0.5, 5.0
#: Calls that fail in a row before a peer is taken for dead.
FAILURES = 2
#: Between two calls of a peer that cannot be called [s].
CLIENT_PAUSE_S = 0.1
#: Longest goodbye [s].
GOODBYE_S = 0.5


class PresenceService:
    """Keeps one census up to date; everything happens on one event loop.

    Args:
        dht: A running DHT of the peer.
        prefix: Name of the run.
        census: What is kept up to date.
        heartbeat: Between two signs of life [s].
        expiration: How long an entry in the DHT is valid [s].
        on_change: Called whenever the census may have changed.
    """

    def __init__(
        self,
        dht: DHT,
        prefix: str,
        census: Census,
        *,
        heartbeat: float,
        expiration: float,
        on_change: Callable[[], None],
    ) -> None:
        self.census, self._dht, self._on_change = census, dht, on_change
        self._name, self._key = f"{prefix}.presence", f"{prefix}_presence"
        self._heartbeat, self._expiration = heartbeat, expiration
        self._p2p: P2P
        self._calls: dict[bytes, asyncio.Task[None]] = {}
        self._news: dict[bytes, asyncio.Event] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then say goodbye."""
        self._p2p = await P2P.replicate(await self._daemon())
        jobs = []
        try:
            if not self.census.own.client_mode:
                await self._p2p.add_protobuf_handler(self._name, self._answer, BytesValue)
            jobs = [asyncio.create_task(job()) for job in (self._meet, self._watch)]
            await stop.wait()
            await self._say_goodbye()
            if not self.census.own.client_mode:
                await self._p2p.remove_protobuf_handler(self._name)
        finally:
            for task in [*jobs, *self._calls.values()]:
                task.cancel()
            await asyncio.gather(*jobs, *self._calls.values(), return_exceptions=True)
            await self._p2p.shutdown()

    async def _daemon(self) -> Any:
        return await self._dht.run_coroutine(DHT._get_p2p_daemon_listen_maddr, return_future=True)

    def tell(self) -> None:
        """Call everybody now: there are news of this peer."""
        for event in self._news.values():
            event.set()

    # -- calls ---------------------------------------------------------------------------------

    async def _answer(self, request: BytesValue, context: P2PContext) -> BytesValue:
        self._take_in(request)
        with self.census.lock:
            return self._letter(self.census.told())

    @staticmethod
    def _letter(content: list[Any]) -> BytesValue:
        return BytesValue(value=MSGPackSerializer.dumps(content))

    def _take_in(self, letter: BytesValue) -> None:
        with self.census.lock:
            for fields, age in MSGPackSerializer.loads(letter.value):
                self.census.hear(Presence.unpack(fields), age)
            self._start_calls()
        self._on_change()

    def _start_calls(self) -> None:
        for presence in self.census.others():
            if presence.client_mode:
                continue
            peer = presence.peer_id
            if peer not in self._calls or self._calls[peer].done():
                self._news[peer] = asyncio.Event()
                self._calls[peer] = asyncio.create_task(self._keep_calling(peer))

    async def _keep_calling(self, peer: bytes) -> None:
        """Call a peer for as long as it is known: at news, and as a sign of life."""
        failures, news = 0, self._news[peer]
        while self._knows(peer):
            news.clear()
            try:
                await asyncio.wait_for(self._call(peer), self.census.silence / FAILURES)
                failures = 0
            except asyncio.CancelledError:
                raise
            except Exception as error:
                failures += 1
                if failures == FAILURES:
                    logger.warning(f"going on without {PeerID(peer)}, no answer: {error!r}")
                    with self.census.lock:
                        self.census.give_up(peer)
                    self._on_change()
                if failures < FAILURES:
                    continue
            # what others have to say, a client hears when it calls
            pause = CLIENT_PAUSE_S if self.census.own.client_mode else self._heartbeat
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(news.wait(), pause)

    def _knows(self, peer: bytes) -> bool:
        with self.census.lock:
            return any(other.peer_id == peer for other in self.census.others())

    def _present(self) -> set[bytes]:
        with self.census.lock:
            return {presence.peer_id for presence in self.census.present()}

    async def _call(self, peer: bytes) -> None:
        letter = self._letter([[self.census.own.pack(), 0.0]])
        answer = await self._p2p.call_protobuf_handler(PeerID(peer), self._name, letter, BytesValue)
        self._take_in(answer)

    async def _watch(self) -> None:
        """Notice silence, which is no event."""
        while True:
            await asyncio.sleep(self._heartbeat / 2)
            with self.census.lock:
                self.census.forget(self._expiration)
            self._on_change()

    # -- the DHT -------------------------------------------------------------------------------

    async def _meet(self) -> None:
        """Be found in the DHT, and look there for peers that are not known yet."""
        declared = -float("inf")
        while True:
            try:
                if get_dht_time() - declared > self._expiration / 3:
                    declared = get_dht_time()
                    await self._declare(True)
                await self._look()
            except asyncio.CancelledError:
                raise
            except Exception as error:
                logger.debug(f"could not look for peers: {error!r}")
            alone = len(self._present()) == 1
            await asyncio.sleep(LOOK_ALONE_S if alone else LOOK_S)

    async def _declare(self, here: bool) -> None:
        await self._dht.store(
            self._key,
            subkey=self.census.own.peer_id,
            value=here,
            expiration_time=get_dht_time() + self._expiration,
            return_future=True,
        )

    async def _look(self) -> None:
        found = await self._dht.get(self._key, latest=True, return_future=True)
        entries = getattr(found, "value", None)
        known = self._present()
        for peer, entry in entries.items() if isinstance(entries, dict) else ():
            if entry.value and peer not in known:
                with contextlib.suppress(Exception):  # an entry outlives its peer
                    await asyncio.wait_for(self._call(peer), self.census.silence)

    async def _say_goodbye(self) -> None:
        """Tell everybody that this peer takes part no more."""
        calls = [self._call(peer) for peer, task in self._calls.items() if not task.done()]
        last = asyncio.gather(self._declare(False), *calls, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(last, GOODBYE_S)
