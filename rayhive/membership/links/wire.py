"""Frames on one connection, driven by the event loop and without a copy of large bodies.

A body is sent from the caller's memory and received into memory that is allocated for it alone.
Encryption adds one copy on each side. Short frames of one turn of the event loop leave together:
each write, read and encryption costs as much as 100 kB.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayhive.membership.links.pace import Pace
from rayhive.membership.links.records import LONG, RecordReader, RecordWriter

if TYPE_CHECKING:
    from rayhive.membership.links.handshake import Opened

#: Kind, stream, bytes of the head and bytes of the body.
_HEADER = struct.Struct("!BIIQ")
#: Largest head and body [bytes]; a longer one is taken for a broken connection.
MAX_HEAD, MAX_BODY = 1 << 20, 1 << 32
#: Bytes that one callback reads or writes at most, so that other callbacks get their turn.
_TURN = 1 << 19
#: Bytes of frames that leave together.
_BATCH = 1 << 16
#: Bytes of queued frames from which on a sender should wait.
_HIGH = 1 << 20
#: Unsent bytes that the kernel holds for a connection. More would delay urgent frames.
_UNSENT = 1 << 19
#: Time without an acknowledgement after which the kernel gives a connection up [ms].
_UNACKNOWLEDGED_MS = 15_000
#: Round trip below which CUBIC is used instead of BBR [s].
_NEAR_S = 0.01
#: Priorities in a queue of this machine that knows some (Linux: TC_PRIO_BULK and _INTERACTIVE).
_BULK, _URGENT = 2, 6

Buffer = bytes | bytearray | memoryview
#: Takes kind, stream, head and body of a frame.
OnFrame = Callable[[int, int, bytes, memoryview], None]


@dataclass(frozen=True)
class _Queued:
    """Frame that waits to be written.

    Attributes:
        stream: Its stream.
        start: Its header and head.
        body: Its body.
    """

    stream: int
    start: bytes
    body: memoryview

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self.start) + self.body.nbytes


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
        pace: Measures the connection.
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
        self._socket = opened.connection
        self.pace = Pace(self._socket)
        self._on_frame, self._on_lost, self._on_life = on_frame, on_lost, on_life
        self._loop = asyncio.get_running_loop()
        self._descriptor = self._socket.fileno()
        _control_congestion(self._socket, self.pace)
        if hasattr(socket, "SO_PRIORITY"):
            priority = _BULK if bulk else _URGENT
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        self._queue: deque[_Queued] = deque()
        self._writer, self._is_plain = RecordWriter(opened.seal), opened.seal is None
        self._leaving, self._streams = deque[memoryview](), set[int]()  # of frames that have begun
        self._queued_bytes, self._waits_for_space, self._will_write = 0, False, False
        self._turns = deque[asyncio.Future[None]]()
        self._reader = RecordReader(self._socket, opened.open, self._arrived)
        self._awaits_body: tuple[int, int, bytes] | None = None
        self._loop.add_reader(self._descriptor, self._read)

    # -- writing -----------------------------------------------------------------------------------

    def send(self, kind: int, stream: int, head: bytes = b"", body: Buffer = b"") -> None:
        """Queue a frame; its body must not change before it has left, see :meth:`keep`."""
        if self.lost is not None:
            return
        body = memoryview(body)
        start = _HEADER.pack(kind, stream, len(head), body.nbytes) + head
        queued = _Queued(stream, start, body)
        self._queue.append(queued)
        self._queued_bytes += queued.size
        if self._waits_for_space:
            return
        if self._queued_bytes >= _BATCH:
            self._write()
        elif not self._will_write:  # what follows in this turn leaves with it
            self._will_write = True
            self._loop.call_soon(self._write_at_last)

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
        if self._is_plain and stream in self._streams:
            self._leaving = deque(memoryview(bytes(view)) for view in self._leaving)
            self._streams.clear()
        dropped = [queued for queued in self._queue if queued.stream == stream]
        if dropped:
            self._queued_bytes -= sum(queued.size for queued in dropped)
            self._queue = deque(queued for queued in self._queue if queued.stream != stream)
        self.give_turn()

    def _write_at_last(self) -> None:
        self._will_write = False
        if self.lost is None and not self._waits_for_space:
            self._write()

    def _write(self) -> None:
        turn, full = _TURN, False
        try:
            while (self._leaving or self._queue) and turn > 0:
                if not self._leaving:
                    self._begin()
                sent = self._write_some()
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
        wanted = full or bool(self._leaving or self._queue)
        if wanted and not self._waits_for_space:
            self._loop.add_writer(self._descriptor, self._write)
        elif not wanted and self._waits_for_space:
            self._loop.remove_writer(self._descriptor)
        self._waits_for_space = wanted

    def _begin(self) -> None:
        """Make records of the next frames."""
        contents: list[tuple[memoryview, bool]] = []
        short, size = list[bytes | memoryview](), 0
        self._streams.clear()
        while self._queue and size < _BATCH:
            queued = self._queue.popleft()
            size += queued.size
            self._streams.add(queued.stream)
            short.append(queued.start)
            if queued.body.nbytes < LONG:
                short.append(queued.body)
            else:
                contents += [(memoryview(b"".join(short)), False), (queued.body, True)]
                short.clear()
        if short:
            contents.append((memoryview(b"".join(short)), False))
        self._leaving = self._writer.records(contents)
        self._queued_bytes += sum(view.nbytes for view in self._leaving) - size

    def _write_some(self) -> int:
        sent = left = self._socket.sendmsg(self._leaving)
        while self._leaving and left >= self._leaving[0].nbytes:
            left -= self._leaving.popleft().nbytes
        if left:
            self._leaving[0] = self._leaving[0][left:]
        return sent

    # -- reading -----------------------------------------------------------------------------------

    def _read(self) -> None:
        turn, more = _TURN, True
        try:
            while more and turn > 0 and self.lost is None:
                got, more = self._reader.receive()
                if turn == _TURN:
                    self._on_life()
                turn -= got
        except BlockingIOError:
            return
        except (OSError, ValueError, struct.error) as error:
            self.close(error)

    def _arrived(self, content: memoryview) -> int:
        """Pass on the frames of a record; return the size of a body that is the next record."""
        if self._awaits_body is not None:
            (kind, stream, head), self._awaits_body = self._awaits_body, None
            self._on_frame(kind, stream, head, content)
            return 0
        at = 0
        while at < content.nbytes and self.lost is None:
            kind, stream, head_size, body_size = _HEADER.unpack_from(content, at)
            begin = at + _HEADER.size
            at = begin + head_size
            end = at if body_size >= LONG else at + body_size
            if head_size > MAX_HEAD or body_size > MAX_BODY or end > content.nbytes:
                raise ValueError("a frame is too long")
            head = bytes(content[begin:at])
            if body_size >= LONG:
                if at < content.nbytes:
                    raise ValueError("a frame without its body")
                self._awaits_body = kind, stream, head
                return int(body_size)
            self._on_frame(kind, stream, head, content[at:end])
            at = end
        return 0

    # -- end ---------------------------------------------------------------------------------------

    def close(self, reason: Exception | None = None) -> None:
        """Close the connection; frames that were not sent yet are lost."""
        if self.lost is not None:
            return
        if reason is None and self._will_write:
            self._write_at_last()
        if self.lost is not None:
            return
        self.lost = reason or ConnectionAbortedError("closed by this side")
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        self._queue.clear()
        self._leaving.clear()
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


def _control_congestion(connection: socket.socket, pace: Pace) -> None:
    """Choose the congestion control of a connection, where the system allows it.

    BBR keeps the queue of a slow link short, and other messages do not wait behind bulk data. In a
    network of short round trips BBR sends in windows of four packets, and several connections leave
    a common link idle by turns; CUBIC does not. On loopback there is no queue, and both cost more.
    """
    if hasattr(socket, "TCP_CONGESTION"):  # Linux
        with suppress(OSError):
            name = b"cubic" if pace.round_trip() < _NEAR_S else b"bbr"
            name = b"reno" if pace.is_local else name
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
