"""Frames on one connection, driven by the event loop and without a copy of large bodies.

A body is sent from the caller's memory and received into memory that is allocated for it alone.
Encryption adds one copy on each side.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import numpy as np

from rayhive.membership.links.cipher import TAG, Cipher

if TYPE_CHECKING:
    from rayhive.membership.links.handshake import Opened

#: Kind, stream, bytes of the head and bytes of the body.
_HEADER = struct.Struct("!BIIQ")
#: Largest head and body [bytes]; a longer one is taken for a broken connection.
MAX_HEAD, MAX_BODY = 1 << 20, 1 << 32
#: Bytes that one callback reads or writes at most, so that other callbacks get their turn.
_TURN = 1 << 19
#: Bytes of queued frames from which on a sender should wait.
_HIGH = 1 << 20
#: Unsent bytes that the kernel holds for a connection. More would delay urgent frames.
_UNSENT = 1 << 19
#: Time without an acknowledgement after which the kernel gives a connection up [ms].
_UNACKNOWLEDGED_MS = 15_000
#: Round trip below which CUBIC is used instead of BBR [s].
_NEAR_S = 0.01
#: Place of the shortest round trip in Linux's ``tcp_info`` [us]; all bits are set if it is unknown.
_MIN_RTT = struct.Struct("=148xI")
#: Priorities in a queue of this machine that knows some (Linux: TC_PRIO_BULK and _INTERACTIVE).
_BULK, _URGENT = 2, 6

Buffer = bytes | bytearray | memoryview
#: Takes kind, stream, head and body of a frame.
OnFrame = Callable[[int, int, bytes, memoryview], None]


@dataclass
class _Queued:
    """Frame that waits to be written.

    Attributes:
        stream: Its stream.
        views: Its unsent bytes.
        begun: Whether its first bytes were sent.
    """

    stream: int
    views: deque[memoryview]
    begun: bool = False

    @property
    def size(self) -> int:
        """Number of unsent bytes."""
        return sum(view.nbytes for view in self.views)

    def keep(self) -> None:
        """Copy the unsent bytes, so that the caller may change the memory that it passed."""
        self.views = deque(memoryview(bytes(view)) for view in self.views)


class _Scratch:
    """Memory for encrypted bytes, used again for each frame."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> memoryview:
        """Return ``size`` bytes, which are valid until the next call."""
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory.data[:size]


class Wire:
    """Sends and receives frames on a connection.

    Args:
        opened: Connection after its handshake.
        on_frame: Called for each frame that arrived.
        on_lost: Called once, with the reason, when the connection has ended.
        on_life: Called when bytes arrived, or room for more shows that the other side gets them.
        bulk: Whether it carries bulk data, which leave this machine after other messages.

    Attributes:
        lost: Reason for the end of the connection; None while it is open.
    """

    def __init__(
        self,
        opened: Opened,
        on_frame: OnFrame,
        on_lost: Callable[[Exception], None],
        on_life: Callable[[], None] = lambda: None,
        bulk: bool = True,
    ) -> None:
        self.lost: Exception | None = None
        self._socket, self._seal, self._cipher = opened.connection, opened.seal, opened.open
        self._on_frame, self._on_lost, self._on_life = on_frame, on_lost, on_life
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._socket.fileno()
        _control_congestion(self._socket)
        if hasattr(socket, "SO_PRIORITY"):
            priority = _BULK if bulk else _URGENT
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        self._sealed, self._received = _Scratch(), _Scratch()
        self._queue: deque[_Queued] = deque()
        self._queued_bytes, self._waits_for_space = 0, False
        self._turns = deque[asyncio.Future[None]]()
        self._frame: tuple[int, int] = (0, 0)
        self._sizes, self._head = (0, 0), b""
        self._expect(_HEADER.size, self._header_arrived)
        self._loop.add_reader(self._descriptor, self._read)

    # -- writing -----------------------------------------------------------------------------------

    def send(self, kind: int, stream: int, head: bytes = b"", body: Buffer = b"") -> None:
        """Queue a frame; its body must not change before it has left, see :meth:`keep`."""
        if self.lost is not None:
            return
        body = memoryview(body)
        header = _HEADER.pack(kind, stream, len(head), body.nbytes)
        pieces = (memoryview(piece) for piece in (header, head, body))
        queued = _Queued(stream, deque(piece for piece in pieces if piece.nbytes))
        self._queue.append(queued)
        self._queued_bytes += queued.size
        if not self._waits_for_space:
            self._write()

    async def has_room(self) -> None:
        """Wait until few bytes are queued, or the connection has ended.

        Senders take turns. One that does not send then calls :meth:`give_turn`.
        """
        if self.lost is not None or not (self._turns or self._queued_bytes > _HIGH):
            return
        turn = self._loop.create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            self.give_turn()  # this turn may have come already
            raise

    def give_turn(self) -> None:
        """Let one sender go on, if there is room; or all if the connection has ended."""
        while self._turns and (self.lost is not None or self._queued_bytes <= _HIGH):
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                if self.lost is None:
                    return

    def keep(self, stream: int) -> None:
        """Drop the frames of a stream that were not begun; copy the unsent bytes of a begun one."""
        for queued in self._queue:
            if queued.stream == stream and queued.begun:
                queued.keep()
            elif queued.stream == stream:
                self._queued_bytes -= queued.size
        self._queue = deque(q for q in self._queue if q.stream != stream or q.begun)
        self.give_turn()

    def _write(self) -> None:
        turn, full = _TURN, False
        try:
            while self._queue and turn > 0:
                sent = self._write_some(self._queue[0])
                if self._waits_for_space and turn == _TURN:
                    self._on_life()
                turn -= sent
                self._queued_bytes -= sent
        except BlockingIOError:
            full = True
        except OSError as error:
            self.close(error)
            return
        self.give_turn()
        wanted = full or bool(self._queue)
        if wanted and not self._waits_for_space:
            self._loop.add_writer(self._descriptor, self._write)
        elif not wanted and self._waits_for_space:
            self._loop.remove_writer(self._descriptor)
        self._waits_for_space = wanted

    def _write_some(self, queued: _Queued) -> int:
        if not queued.begun:
            queued.begun = True
            if self._seal is not None:  # not earlier, as the order of the records is fixed
                self._encrypt(queued, self._seal)
        sent = left = self._socket.sendmsg(queued.views)
        while queued.views and left >= queued.views[0].nbytes:
            left -= queued.views.popleft().nbytes
        if queued.views:
            queued.views[0] = queued.views[0][left:]
        else:
            self._queue.popleft()
        return sent

    def _encrypt(self, queued: _Queued, seal: Cipher) -> None:
        """Replace a frame by its records."""
        contents = queued.views
        memory = self._sealed.take(queued.size + TAG * len(contents))
        records, start = deque[memoryview](), 0
        for content in contents:
            records.append(memory[start : start + content.nbytes + TAG])
            seal.seal(content, records[-1])
            start += content.nbytes + TAG
        queued.views = records
        self._queued_bytes += TAG * len(contents)

    # -- reading -----------------------------------------------------------------------------------

    def _expect(self, size: int, then: Callable[[memoryview], None]) -> None:
        """Receive the next ``size`` bytes of content, then call ``then`` with them."""
        if self._cipher is None:
            self._record = np.empty(size, np.uint8).data
        else:  # decryption copies it
            self._record = self._received.take(size + TAG)
        self._missing, self._then = self._record, then

    def _read(self) -> None:
        turn = _TURN
        try:
            while turn > 0 and self.lost is None:
                got = self._socket.recv_into(self._missing)
                if not got:
                    raise ConnectionResetError("closed by the other side")
                if turn == _TURN:
                    self._on_life()
                turn -= got
                self._missing = self._missing[got:]
                if not self._missing:
                    record = self._record
                    self._then(record if self._cipher is None else self._cipher.open(record))
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self.close(error)

    def _header_arrived(self, header: memoryview) -> None:
        kind, stream, head, body = _HEADER.unpack(header)
        if head > MAX_HEAD or body > MAX_BODY:
            raise ValueError("a frame is too long")
        self._frame, self._sizes, self._head = (kind, stream), (head, body), b""
        if head:
            self._expect(head, self._head_arrived)
        else:
            self._head_arrived(memoryview(b""))

    def _head_arrived(self, head: memoryview) -> None:
        self._head = bytes(head)
        if self._sizes[1]:
            self._expect(self._sizes[1], self._body_arrived)
        else:
            self._body_arrived(memoryview(b""))

    def _body_arrived(self, body: memoryview) -> None:
        self._expect(_HEADER.size, self._header_arrived)
        self._on_frame(*self._frame, self._head, body)

    # -- end ---------------------------------------------------------------------------------------

    def close(self, reason: Exception | None = None) -> None:
        """Close the connection; frames that were not sent yet are lost."""
        if self.lost is not None:
            return
        self.lost = reason or ConnectionAbortedError("closed by this side")
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._queue.clear()
        self._queued_bytes = 0
        self._socket.close()
        self.give_turn()
        self._on_lost(self.lost)


def prepare(connection: socket.socket) -> None:
    """Set the options of a connection's socket, so that frames leave at once and few wait."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options: dict[str, Any] = {
        "TCP_USER_TIMEOUT": _UNACKNOWLEDGED_MS,
        "TCP_NOTSENT_LOWAT": _UNSENT,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _control_congestion(connection: socket.socket) -> None:
    """Choose the congestion control of a connection, where the system allows it.

    BBR keeps the queue of a slow link short, and other messages do not wait behind bulk data. In a
    network of short round trips BBR sends in windows of four packets, and several connections leave
    a common link idle by turns; CUBIC does not. On loopback there is no queue, and both cost more.
    """
    place = connection.getpeername()
    is_local = bool(place) and ip_address(place[0].partition("%")[0]).is_loopback
    if hasattr(socket, "TCP_CONGESTION"):  # Linux
        with suppress(OSError):
            name = b"cubic" if _round_trip(connection) < _NEAR_S else b"bbr"
            name = b"reno" if is_local else name
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)


def _round_trip(connection: socket.socket) -> float:
    """Return the shortest round trip of a connection so far [s]; on Linux."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
    (shortest,) = _MIN_RTT.unpack(info.ljust(_MIN_RTT.size, b"\xff"))
    return float(shortest) * 1e-6
