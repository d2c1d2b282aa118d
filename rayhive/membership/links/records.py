"""Records of one connection: pieces of its stream, each of them encrypted as a whole.

A short record follows its length. The length of a long one is known from the record before it, so
that it arrives in memory of its own, without a copy.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from rayhive.membership.links.cipher import TAG, Cipher

#: Content of this size or more is a long record [bytes].
LONG = 1 << 13
#: Bytes that are received at once, unless a long record is on its way.
_BUFFER = 1 << 15
#: Largest content of a short record [bytes]; a longer one is taken for a broken connection.
_MAX_SHORT = 1 << 22
_LENGTH = struct.Struct("!I")

#: Takes the content of a record; returns the size of the content of a long record that follows, or
#: 0 if a short one follows.
OnContent = Callable[[memoryview], int]


class _Scratch:
    """Memory for encrypted bytes, used again for each record."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> memoryview:
        """Return ``size`` bytes, which are valid until the next call."""
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory.data[:size]


class RecordWriter:
    """Makes records.

    Args:
        seal: Encrypts them; None for plain records.
    """

    def __init__(self, seal: Cipher | None) -> None:
        self._seal, self._sealed = seal, _Scratch()

    def records(self, contents: Sequence[tuple[memoryview, bool]]) -> deque[memoryview]:
        """Return the bytes of records, which are valid until the next call if encrypted.

        Args:
            contents: Content of each record, and whether it is a long one.
        """
        if self._seal is None:
            made = deque[memoryview]()
            for content, is_long in contents:
                if not is_long:
                    made.append(memoryview(_LENGTH.pack(content.nbytes)))
                made.append(content)
            return made
        sizes = [content.nbytes + TAG + _LENGTH.size * (not long) for content, long in contents]
        memory, start = self._sealed.take(sum(sizes)), 0
        for (content, is_long), size in zip(contents, sizes, strict=True):
            if not is_long:
                _LENGTH.pack_into(memory, start, content.nbytes)
            end = start + size
            self._seal.seal(content, memory[end - content.nbytes - TAG : end])
            start = end
        return deque((memory,))


class RecordReader:
    """Receives records.

    Args:
        connection: The connection, which does not block.
        cipher: Decrypts the records; None for plain ones.
        on_content: Called for each record.
    """

    def __init__(
        self, connection: socket.socket, cipher: Cipher | None, on_content: OnContent
    ) -> None:
        self._connection, self._cipher, self._on_content = connection, cipher, on_content
        self._overhead = 0 if cipher is None else TAG
        self._buffer, self._scratch = np.empty(_BUFFER, np.uint8).data, _Scratch()
        self._long: memoryview | None = None
        self._filled = 0  # of the long record, or else of the buffer
        self._size = 0  # of the next record; 0 if its length comes first

    def receive(self) -> tuple[int, bool]:
        """Receive once.

        Returns:
            Number of bytes, and whether more of them may have arrived.

        Raises:
            BlockingIOError: Nothing has arrived.
            OSError: The connection has ended, or a record was changed.
            ValueError: The other side broke the rules.
        """
        room = (self._buffer if self._long is None else self._long)[self._filled :]
        got = self._connection.recv_into(room)
        if not got:
            raise ConnectionResetError("closed by the other side")
        self._filled += got
        if self._long is None:
            self._split()
        elif got == room.nbytes:
            record, self._long, self._filled = self._long, None, 0
            content = record if self._cipher is None else self._cipher.open(record)
            self._expect(self._on_content(content))
        return got, got == room.nbytes

    def _opened(self, record: memoryview) -> memoryview:
        """Return the content of a record in the buffer, in new memory."""
        if self._cipher is not None:
            return self._cipher.open(record)
        return np.array(record).data

    def _expect(self, long: int) -> None:
        self._size = long + self._overhead if long else 0

    def _split(self) -> None:
        """Take the records in the buffer; keep the begin of one that is not complete."""
        at, filled = 0, self._filled
        while True:
            if not self._size:
                if filled - at < _LENGTH.size:
                    break
                (size,) = _LENGTH.unpack_from(self._buffer, at)
                if not 0 < size <= _MAX_SHORT:
                    raise ValueError(f"a record of {size} bytes")
                self._size, at = size + self._overhead, at + _LENGTH.size
            end = at + self._size
            if end > filled:
                break
            record, at = self._buffer[at:end], end
            self._expect(self._on_content(self._opened(record)))
        rest = self._buffer[at:filled]
        if self._size > _BUFFER:
            if self._cipher is None:
                self._long = np.empty(self._size, np.uint8).data
            else:  # decryption copies it
                self._long = self._scratch.take(self._size)
            self._long[: rest.nbytes] = rest
        else:
            self._buffer[: rest.nbytes] = rest
        self._filled = rest.nbytes
