"""Link: calls between two peers over one connection.

A call has a stream of packets in each direction. Both sides may call, at the same time and several
times. A stream whose reader is slow holds up no other: a sender needs credit, which the reader
grants as it takes packets.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from typing import NamedTuple

from hivemind.p2p import PeerID
from hivemind.utils import get_logger

from rayhive.membership.event_loop import Notifier
from rayhive.membership.links.handshake import Opened
from rayhive.membership.links.lossless import SHORTEST, coded, restored
from rayhive.membership.links.wire import Buffer, Wire

logger = get_logger(__name__)

#: Bytes of packets that a sender may be ahead of the reader; one packet may exceed it.
WINDOW = 1 << 23
_OPEN, _PACKET, _END, _RESET, _CREDIT, _ASK, _ANSWER, _CODED = range(8)
_AMOUNT = struct.Struct("!Q")


class Packet(NamedTuple):
    """One message of a call.

    Attributes:
        head: Description, for the receiver to interpret.
        body: Bulk data; it must not change before it has left.
    """

    head: bytes
    body: Buffer = b""


class LinkLost(ConnectionError):
    """The link ended, or the other side ended a call early."""


#: Answers the calls of a method: takes the caller's packets and the caller.
Handler = Callable[[AsyncIterator[Packet], PeerID], AsyncGenerator[Packet, None]]
#: Answers a question at once: takes the question and the peer that asks.
Reply = Callable[[bytes, PeerID], bytes]
#: Called with a peer when data show that it lives.
Heard = Callable[[PeerID], None]


def no_reply(question: bytes, peer: PeerID) -> bytes:
    """Refuse a question."""
    raise ConnectionRefusedError("this side answers no questions")


class _Stream:
    """This side of one call: packets that arrived, and credit for packets to send.

    Args:
        link: The link.
        number: Number of the call.
        method: Method to call, if this side calls. The other side is told with the first packet:
            both leave in one write.
    """

    def __init__(self, link: Link, number: int, method: str | None = None) -> None:
        self.number = number
        self._calls, self._untold = method is not None, method
        self.serving: asyncio.Task[None] | None = None
        self._link, self._inbox = link, deque[Packet]()
        self._changes = Notifier()
        self._credit, self._taken = WINDOW, 0
        self._ended, self._error = False, link.wire.lost

    def arrived(self, kind: int, head: bytes, body: memoryview) -> None:
        """Note a frame of the other side."""
        if kind in (_PACKET, _CODED):
            self._inbox.append(Packet(head, restored(body) if kind == _CODED else body))
        elif kind == _END:
            self._ended = True
        elif kind == _CREDIT:
            self._credit += _AMOUNT.unpack(head)[0]
        else:
            self.fail(LinkLost(f"{self._link.peer} ended the call"))
        self._changes.notify()

    @property
    def is_over(self) -> bool:
        """Whether the other side has ended this side's call, and takes no more packets."""
        return self._calls and self._ended

    @property
    def is_known(self) -> bool:
        """Whether the other side knows of the call, and waits for more of it."""
        return self._untold is None and not self.is_over

    def fail(self, error: Exception) -> None:
        """End the call early on this side."""
        self._error = self._error or error
        if self.serving is not None:
            self.serving.cancel()
        self._changes.notify()

    async def send(self, packet: Packet) -> None:
        """Send a packet once there is credit for it.

        Raises:
            LinkLost: The call has ended.
        """
        while self._credit <= 0 and self._error is None and not self.is_over:
            await self._changes.next_change().wait()
        await self._link.wire.has_room()
        if self._error is not None or self.is_over:
            self._link.wire.give_turn()
            raise LinkLost(str(self._error or "the call is over")) from self._error
        size = memoryview(packet.body).nbytes
        self._credit -= size
        is_coded = size >= SHORTEST and self._link.wire.pace.is_slow()
        coding = coded(packet.body) if is_coded else None
        kind, body = (_PACKET, packet.body) if coding is None else (_CODED, coding)
        self._begin()
        self._link.wire.send(kind, self.number, packet.head, body)

    def end(self) -> None:
        """Tell the other side that no more packets follow."""
        self._begin()
        self._link.wire.send(_END, self.number)

    def _begin(self) -> None:
        if self._untold is not None:
            self._link.wire.send(_OPEN, self.number, self._untold.encode())
            self._untold = None

    async def receive(self) -> Packet | None:
        """Return the next packet; None after the last one.

        Raises:
            LinkLost: The call has ended early.
        """
        while not self._inbox:
            if self._error is not None:
                raise LinkLost(str(self._error)) from self._error
            if self._ended:
                return None
            await self._changes.next_change().wait()
        packet = self._inbox.popleft()
        self._taken += memoryview(packet.body).nbytes
        if self._taken >= WINDOW // 4:
            self._link.wire.send(_CREDIT, self.number, _AMOUNT.pack(self._taken))
            self._taken = 0
        return packet

    async def received(self) -> AsyncIterator[Packet]:
        """Yield the packets of the other side until its last one."""
        while (packet := await self.receive()) is not None:
            yield packet


class Call:
    """Answers to one call, as an asynchronous iterator; :meth:`aclose` ends the call early."""

    def __init__(self, link: Link, stream: _Stream, requests: AsyncGenerator[Packet, None]) -> None:
        self._link, self._stream = link, stream
        self._sending = asyncio.create_task(self._send(requests))

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Packet:
        try:
            packet = await self._stream.receive()
        except Exception:
            await self.aclose()
            raise
        if packet is None:
            await self.aclose()
            raise StopAsyncIteration
        return packet

    async def aclose(self) -> None:
        """End the call. Requests that wait to leave are dropped, and their memory is free again."""
        self._link.forget(self._stream)
        self._sending.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._sending

    async def _send(self, requests: AsyncGenerator[Packet, None]) -> None:
        try:
            async with aclosing(requests):
                async for packet in requests:
                    await self._stream.send(packet)
            self._stream.end()
        except Exception as error:
            if not self._stream.is_over:  # answers may be there to be read
                self._stream.fail(error)


class Link:
    """One connection to a peer, over which both sides call each other.

    Args:
        opened: Connection after its handshake.
        peer: The other side.
        dialled: Whether this side began the connection.
        handlers: Answers to calls, by method.
        heard: Called with the peer when data show that it lives.
        reply: Answers the questions of the peer.
        bulk: Whether it carries bulk data, see :class:`Wire`.

    Attributes:
        peer: The other side.
        wire: The connection.
        ended: Set when the link has ended.
    """

    def __init__(
        self,
        opened: Opened,
        peer: PeerID,
        dialled: bool,
        handlers: Mapping[str, Handler],
        heard: Heard = lambda peer: None,
        reply: Reply = no_reply,
        bulk: bool = True,
    ) -> None:
        self.peer, self.ended = peer, asyncio.Event()
        self._handlers, self._reply = handlers, reply
        self._questions: dict[int, asyncio.Future[bytes]] = {}
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count(1 if dialled else 2, 2)
        self._serving: dict[asyncio.Task[None], str] = {}
        self._served = set[str]()
        self.wire = Wire(opened, self._on_frame, self._on_lost, lambda: heard(peer), bulk)

    def call(self, method: str, requests: AsyncGenerator[Packet, None]) -> Call:
        """Call a method of the peer; requests leave at once, without waiting for answers."""
        stream = _Stream(self, next(self._numbers), method)
        self._streams[stream.number] = stream
        return Call(self, stream, requests)

    async def ask(self, question: bytes) -> bytes:
        """Return the answer of the peer to a short question, which takes no stream of packets.

        Raises:
            LinkLost: The link ended, or the peer does not answer questions.
        """
        if self.wire.lost is not None:
            raise LinkLost(f"the link to {self.peer} has ended")
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self.wire.send(_ASK, number, question)
        try:
            return await answer
        finally:
            self._questions.pop(number, None)

    async def answered(self, methods: Collection[str]) -> None:
        """Wait until the peer has all answers to its calls of some methods, or the link ends.

        It reads frames in their order: what it says to a question comes after the answers.
        """
        if self._served.isdisjoint(methods):
            return
        calls = [task for task, method in self._serving.items() if method in methods]
        if calls:
            await asyncio.wait(calls)
        with suppress(LinkLost):
            await self.ask(b"")

    def close(self) -> None:
        """End the link and all calls."""
        self.wire.close()

    def forget(self, stream: _Stream) -> None:
        """End a call on this side, and tell the other one if it waits for more."""
        if self._streams.pop(stream.number, None) is not None:
            self.wire.keep(stream.number)
            if stream.is_known:
                self.wire.send(_RESET, stream.number)

    def _on_frame(self, kind: int, number: int, head: bytes, body: memoryview) -> None:
        if kind == _OPEN:
            stream = self._streams[number] = _Stream(self, number)
            method = head.decode()
            serving = stream.serving = asyncio.create_task(self._serve(stream, method))
            self._serving[serving] = method
            self._served |= {method} & self._handlers.keys()
            serving.add_done_callback(self._serving.pop)
        elif kind == _ASK:
            self._answer(number, head)
        elif number in self._questions:
            question = self._questions.pop(number)
            if kind == _ANSWER and not question.done():
                question.set_result(head)
            elif not question.done():
                question.set_exception(LinkLost(f"{self.peer} did not answer"))
        elif number in self._streams:
            stream = self._streams[number]
            if kind == _RESET:
                del self._streams[number]
                self.wire.keep(number)
            stream.arrived(kind, head, body)

    def _answer(self, number: int, question: bytes) -> None:
        try:
            self.wire.send(_ANSWER, number, self._reply(question, self.peer))
        except Exception as error:
            logger.debug(f"a question of {self.peer} failed: {error!r}")
            self.wire.send(_RESET, number)

    async def _serve(self, stream: _Stream, method: str) -> None:
        try:
            async with aclosing(self._handlers[method](stream.received(), self.peer)) as answers:
                async for packet in answers:
                    await stream.send(packet)
        except Exception as error:
            logger.debug(f"a call of {self.peer} failed: {error!r}")
            self.forget(stream)
        except BaseException:
            self.forget(stream)
            raise
        else:
            stream.end()
            self._streams.pop(stream.number, None)

    def _on_lost(self, reason: Exception) -> None:
        streams = list(self._streams.values())
        self._streams.clear()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(LinkLost(f"the link to {self.peer} ended: {reason!r}"))
        for stream in streams:
            stream.fail(LinkLost(f"the link to {self.peer} ended: {reason!r}"))
        self.ended.set()
