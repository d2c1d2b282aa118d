"""Records of a link, and the frames in them, over a pair of sockets."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from rayhive.membership.links.cipher import Cipher, Tampered, cipher
from rayhive.membership.links.handshake import Opened
from rayhive.membership.links.records import LONG, RecordReader, RecordWriter
from rayhive.membership.links.wire import Wire
from tests.unit.link_fakes import run

SIZES = [1, 2, 40, LONG - 1, LONG, LONG + 1, 1 << 15, (1 << 15) + 1, 100_000]


def key(encrypted: bool) -> Cipher | None:
    return cipher(bytes(32), bytes(64), b"one side") if encrypted else None


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    for end in (near, far):
        end.setblocking(False)
    yield near, far
    near.close()
    far.close()


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("piece", [1, 7, 5000, 10**6])
def test_records_arrive_whole_however_their_bytes_arrive(
    ends: tuple[socket.socket, socket.socket], encrypted: bool, piece: int
) -> None:
    near, far = ends
    chance = random.Random(0)
    contents = [chance.randbytes(size) for size in (SIZES[:5] if piece < 10 else SIZES * 2)]
    got: list[bytes] = []

    def arrived(content: memoryview) -> int:
        got.append(bytes(content))
        after = contents[len(got)] if len(got) < len(contents) else b""
        return len(after) if len(after) >= LONG else 0

    pairs = [(memoryview(content), len(content) >= LONG) for content in contents]
    made = b"".join(RecordWriter(key(encrypted)).records(pairs))
    reader = RecordReader(far, key(encrypted), arrived)
    for begin in range(0, len(made), piece):
        left = memoryview(made)[begin : begin + piece]
        while left:
            left = left[near.send(left) :]
            with suppress(BlockingIOError):
                while reader.receive()[1]:
                    pass
    assert got == contents


def test_a_changed_byte_of_a_record_is_noticed(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    near, far = ends
    made = bytearray(b"".join(RecordWriter(key(True)).records([(memoryview(b"content"), False)])))
    made[-1] ^= 1
    near.send(made)
    with pytest.raises(Tampered):
        RecordReader(far, key(True), lambda content: 0).receive()


@pytest.mark.parametrize("length", [b"\0\0\0\0", b"\xff\xff\xff\xff"])
def test_a_record_of_an_impossible_size_is_refused(
    ends: tuple[socket.socket, socket.socket], length: bytes
) -> None:
    near, far = ends
    near.send(length + b"x")
    with pytest.raises(ValueError, match="a record of"):
        RecordReader(far, None, lambda content: 0).receive()


# -- frames ----------------------------------------------------------------------------------------


def test_short_frames_of_one_turn_leave_together() -> None:
    frames: list[tuple[int, int, bytes, bytes]] = []
    expected = [(1, stream, b"head %d" % stream, bytes(stream)) for stream in range(10)]
    expected.append((1, 10, b"long", bytes(3 * LONG)))
    expected += [(2, stream, b"", b"") for stream in range(10)]

    async def body() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        listener.close()
        for end in (client, server):
            end.setblocking(False)
        done, lost = asyncio.Event(), list[Exception]()

        def on_frame(kind: int, stream: int, head: bytes, content: memoryview) -> None:
            frames.append((kind, stream, head, bytes(content)))
            if len(frames) == len(expected):
                done.set()

        writer = CountedCipher(cipher(bytes(32), bytes(64), b"one side"))
        sender = Wire(Opened(client, writer, key(True)), on_frame, lost.append)
        receiver = Wire(Opened(server, key(True), key(True)), on_frame, lost.append)
        for kind, stream, head, content in expected:
            sender.send(kind, stream, head, content)
        await done.wait()
        assert writer.records == 3, "all until the long body, that body, and the rest"
        sender.close()
        receiver.close()

    run(body())
    assert frames == expected


class CountedCipher(Cipher):
    """Counts the records that it encrypts."""

    def __init__(self, inner: Cipher) -> None:
        self._inner, self.records = inner, 0

    def seal(self, content: memoryview, record: memoryview) -> None:
        """Encrypt content as the next record."""
        self.records += 1
        self._inner.seal(content, record)
