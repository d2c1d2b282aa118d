"""Push-based membership: peers send state changes to each other instead of polling the DHT.

Every peer calls every other peer: at once when its state has changed, and otherwise once per
heartbeat interval. The answer holds everything that the called peer knows, so a newcomer that
reaches one peer knows all of them. A peer that fails to answer twice in a row, or is silent for
too long, counts as dead until it is heard of again. Peers find each other first through the DHT
(:mod:`rayhive.membership.discovery`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]
from hivemind.dht import DHT
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.utils import MSGPackSerializer, get_logger

from rayhive.membership.discovery import Dialer, Discovery
from rayhive.membership.event_loop import Notifier, wait_at_most
from rayhive.membership.view import Heartbeat, MembershipView

logger = get_logger(__name__)

#: Calls that fail in a row before a peer counts as dead.
FAILURES = 2
#: Interval between two calls of a peer in client mode, which cannot be called itself [s].
CLIENT_PAUSE_S = 0.1
#: Longest goodbye [s].
GOODBYE_S = 0.5
#: How long a lost peer is called again [s]; a link may be cut for so long.
RETRY_FOR_S = 3600.0
#: After this time a lost peer is called less often [s], by this factor.
SELDOM_AFTER_S, SELDOM = 600.0, 5


class HeartbeatService:
    """Keeps one membership view up to date, on one event loop.

    Args:
        dht: A running DHT of the peer.
        prefix: Name of the run.
        view: The view.
        heartbeat: Interval between two heartbeats [s].
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
        self._name = f"{prefix}.heartbeat"
        self._heartbeat, self._expiration = heartbeat, expiration
        self._patience = view.silence / FAILURES
        self._p2p: P2P
        self._calls: dict[bytes, asyncio.Task[None]] = {}
        self._changes: dict[bytes, asyncio.Event] = {}
        self._arrivals = Notifier()
        self._dialer = Dialer(view, self._arrivals, heartbeat)
        self._discovery = Discovery(
            dht,
            f"{prefix}_heartbeat",
            self._dialer,
            self._call,
            expiration=expiration,
            patience=self._patience,
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set, then say goodbye to the other peers."""
        daemon = self._dht.run_coroutine(DHT._get_p2p_daemon_listen_maddr, return_future=True)
        self._p2p = await P2P.replicate(await daemon)
        self._dialer.daemon = self._p2p._client
        jobs = []
        try:
            visible = await self._p2p.get_visible_maddrs()
            with self.view.lock:
                own = self.view.own
                self.view.own = replace(own, addresses=tuple(map(str, visible)))
            if not self.view.own.client_mode:
                await self._p2p.add_protobuf_handler(self._name, self._answer, BytesValue)
            jobs = [
                asyncio.create_task(job()) for job in (self._discovery.run, self._check_silence)
            ]
            await stop.wait()
            await self._say_goodbye()
            if not self.view.own.client_mode:
                await self._p2p.remove_protobuf_handler(self._name)
        finally:
            tasks = [*jobs, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._dialer.close()
            await self._p2p.shutdown()

    def announce(self) -> None:
        """Call all live peers at once, because this peer's state has changed.

        A lost peer is not called: a dial in vain would delay the next one.
        """
        for peer in self.view.alive_ids() & self._changes.keys():
            self._changes[peer].set()

    # -- calls -------------------------------------------------------------------------------------

    async def _answer(self, request: BytesValue, context: P2PContext) -> BytesValue:
        self.receive(request)
        with self.view.lock:
            return message(self.view.records())

    def receive(self, letter: BytesValue) -> None:
        """Take the records of a call or an answer into the view."""
        with self.view.lock:
            before = len(self.view.alive())
            for fields, age, idle in MSGPackSerializer.loads(letter.value):
                heartbeat = Heartbeat.unpack(fields)
                is_news = self.view.receive(heartbeat, age, idle)
                change = self._changes.get(heartbeat.peer_id)
                if is_news and change is not None and not self.view.is_alive(heartbeat.peer_id):
                    change.set()  # a lost peer is back: call it at once
            if len(self.view.alive()) > before:
                self._arrivals.notify()
            self._start_calls()
        self._on_change()

    def _start_calls(self) -> None:
        for heartbeat in self.view.known():
            if heartbeat.client_mode:
                continue
            peer = heartbeat.peer_id
            if peer not in self._calls or self._calls[peer].done():
                self._changes[peer] = asyncio.Event()
                self._calls[peer] = asyncio.create_task(self._keep_calling(peer))

    async def _keep_calling(self, peer: bytes) -> None:
        """Call a peer for as long as it is known: at each change, and once per heartbeat."""
        failures, change = 0, self._changes[peer]
        last = time.monotonic()
        while self.view.knows(peer):
            change.clear()
            lost_s = time.monotonic() - last
            try:
                if failures >= FAILURES:
                    await self._dialer.bring_back(peer, self._patience)
                await asyncio.wait_for(self._call(peer), self._patience)
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
            # a peer in client mode receives the state of other peers only in answers
            pause = CLIENT_PAUSE_S if self.view.own.client_mode else self._heartbeat
            if lost_s > SELDOM_AFTER_S:
                pause *= SELDOM
            await wait_at_most(change, pause)

    async def _call(self, peer: bytes) -> None:
        with self.view.lock:
            letter = message([self.view.own_record()])
        answer = await self._p2p.call_protobuf_handler(PeerID(peer), self._name, letter, BytesValue)
        self.receive(answer)

    async def _check_silence(self) -> None:
        """Notice silent peers, of which no message tells."""
        while True:
            await asyncio.sleep(self._heartbeat / 2)
            with self.view.lock:
                self.view.note_losses()
                self.view.forget(max(self._expiration, RETRY_FOR_S))
            self._on_change()

    async def _say_goodbye(self) -> None:
        """Announce to all peers, and in the DHT, that this peer leaves."""
        calls = [self._call(peer) for peer, task in self._calls.items() if not task.done()]
        last = asyncio.gather(self._discovery.declare(False), *calls, return_exceptions=True)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(last, GOODBYE_S)


def message(records: list[list[Any]]) -> BytesValue:
    """Return records of :meth:`MembershipView.records` as a message."""
    return BytesValue(value=MSGPackSerializer.dumps(records))
