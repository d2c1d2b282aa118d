"""Lossless coding of bodies, so that a slow link carries fewer bytes for the same values.

The tensors of a round lie within a few powers of two, so the bytes with their exponents, or their
8-bit codes, are far from random, while the lower bytes of a float are. As in the shuffle filter of
HDF5 and Blosc, a body is taken apart into four planes, one for each place in a word of four bytes.
Zstandard codes those planes that become shorter, chiefly by Huffman's codes (RFC 8878); the others
travel as they are. A body may begin at any place of a word, and hold numbers of 1, 2 or 4 bytes.
"""

from __future__ import annotations

import struct
import threading
from itertools import accumulate

import numpy as np
import zstandard

from rayhive.membership.links.wire import Buffer

#: Shortest body that is worth coding [bytes].
SHORTEST = 1 << 11
#: Longest body that is coded [bytes]. Parts and chunks are shorter; a frame of Zstandard of a few
#: bytes may stand for gigabytes.
LONGEST = 1 << 24
#: Planes of a body.
_PLANES = 4
#: A plane is coded if that saves at least this fraction of it; less is not worth the decoding.
_LEAST_SAVED = 1 / 32
#: Size of the body, and the coded size of each plane, which is 0 if the plane is as it was.
_HEADER = struct.Struct(f"!Q{_PLANES}I")


class _Zstandard(threading.local):
    """Contexts of Zstandard, which one thread may use at a time; level 1 is the fastest."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_zstandard = _Zstandard()


def coded(body: Buffer) -> bytes | None:
    """Return the lossless coding of a body; None if that is not shorter, or the body too long."""
    octets = np.frombuffer(body, np.uint8)
    size = octets.size
    if size > LONGEST:
        return None
    words = octets[: size - size % _PLANES].reshape(-1, _PLANES)
    lengths, contents = list[int](), list[bytes | memoryview]()
    for plane in np.ascontiguousarray(words.T):
        content = _zstandard.compressor.compress(plane.data)
        is_coded = len(content) <= plane.nbytes * (1 - _LEAST_SAVED)
        lengths.append(len(content) if is_coded else 0)
        contents.append(content if is_coded else plane.data)
    contents.append(octets[words.size :].data)
    if _HEADER.size + sum(map(len, contents)) >= size:
        return None
    return b"".join((_HEADER.pack(size, *lengths), *contents))


def restored(coding: Buffer) -> memoryview:
    """Return the body of a coding, in new memory.

    Raises:
        ValueError: It is not a coding.
    """
    view = memoryview(coding)
    if view.nbytes < _HEADER.size:
        raise ValueError(f"a coding of {view.nbytes} bytes")
    size, *lengths = _HEADER.unpack_from(view)
    height, rest = divmod(size, _PLANES)
    sizes = (_HEADER.size, *(length or height for length in lengths), rest)
    ends = list(accumulate(sizes))
    if size > LONGEST or ends[-1] != view.nbytes:
        raise ValueError(f"a coding of {view.nbytes} bytes for a body of {size}")
    body = np.empty(size, np.uint8)
    words = body[: size - rest].reshape(-1, _PLANES)
    for at, length in enumerate(lengths):
        plane = view[ends[at] : ends[at + 1]]
        words[:, at] = np.frombuffer(_decompressed(plane, height) if length else plane, np.uint8)
    body[size - rest :] = np.frombuffer(view[ends[-2] :], np.uint8)
    return body.data


def _decompressed(content: memoryview, size: int) -> bytes:
    """Return the content of a frame of Zstandard.

    Raises:
        ValueError: It has another size, or is damaged.
    """
    try:
        if zstandard.frame_content_size(content) == size:
            return _zstandard.decompressor.decompress(content)
    except zstandard.ZstdError as error:
        raise ValueError(f"a plane of a body: {error}") from None
    raise ValueError(f"a plane of a body has another size than {size} bytes")
