"""Chunked top-k with two-bit values, in a message whose length depends on the shape alone."""

from __future__ import annotations

import numpy as np
import torch
from hivemind.compression import CompressionInfo

from rayhive.compression.codecs.topk import (
    HEADER,
    chunk_bits,
    index_bits,
    kept,
    low_bits,
    segment_bytes,
)
from rayhive.compression.kernels.low_bit import signs, two_magnitudes
from rayhive.compression.kernels.packed import RUN, Bytes, PackedCodec
from rayhive.spec.axes.top_k import CHUNK


class TopK(PackedCodec):
    """Signs, and one of two magnitudes, of the largest elements of each chunk.

    A message has the number of elements per chunk, the magnitudes of all chunks, and one stream of
    bits: of the whole chunks together, then of the shorter last one, first the lower bits of all
    indices, then their upper bits, the signs, and which of the magnitudes.

    Args:
        top_k: Number of elements of a whole chunk.
    """

    compression_type = 67
    block = CHUNK

    def __init__(self, top_k: int = 64) -> None:
        self.top_k = top_k

    def size(self, elements: int) -> int:
        """Return the bytes of an encoding."""
        return segment_bytes(elements, self.top_k)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Return encoded bits per element over 32, for whole chunks."""
        return (self.size(CHUNK) - HEADER) / (4 * CHUNK)

    def pack(self, values: torch.Tensor) -> bytes:
        """Encode flat float32 values without changing them."""
        heads, streams = [], []
        for rows in _groups(values):
            scales, stream = _encode(rows, kept(rows.shape[1], self.top_k))
            heads.append(scales.numpy().tobytes())
            streams.append(stream)
        bits = np.packbits(np.concatenate(streams)) if streams else np.zeros(0, np.uint8)
        return b"".join((np.uint16(self.top_k).tobytes(), *heads, bits.tobytes()))

    def unpack(self, buffer: bytes, elements: int) -> torch.Tensor:
        """Decode to flat float32 values."""
        self.check_size(buffer, max(len(buffer), HEADER))
        top_k = int(np.frombuffer(buffer, np.uint16, count=1)[0])
        if not 1 <= top_k <= CHUNK:
            raise ValueError(f"{top_k} elements of a chunk: not from 1 to {CHUNK} bytes")
        self.check_size(buffer, segment_bytes(elements, top_k))
        count = 2 * -(-elements // CHUNK)
        scales = torch.from_numpy(np.frombuffer(buffer, np.float32, count, HEADER).copy())
        left = np.unpackbits(np.frombuffer(buffer, np.uint8, offset=HEADER + 4 * count))
        values, scales = torch.zeros(elements), scales.view(-1, 2)
        for rows in _groups(values):
            chunks, size = rows.shape
            bits = chunks * chunk_bits(size, top_k)
            _decode(left[:bits], scales[:chunks], rows, kept(size, top_k))
            left, scales = left[bits:], scales[chunks:]
        return values


def _groups(values: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the whole chunks, one per row, and of the shorter last one."""
    whole = len(values) - len(values) % CHUNK
    groups = (values[:whole].view(-1, CHUNK), values[whole:].view(1, -1))
    return [rows for rows in groups if rows.numel()]


def _encode(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, Bytes]:
    """Return the magnitudes of each chunk, and the bits of all, one byte per bit."""
    chunks, size = rows.shape
    places = torch.empty(chunks, count, dtype=torch.int64)
    step = max(1, RUN // size)
    for start in range(0, chunks, step):
        run = rows[start : start + step].abs()
        found = run.topk(count, dim=1, sorted=False).indices
        places[start : start + step] = found.sort(dim=1).values
    chosen, scales = rows.gather(1, places), torch.empty(chunks, 2)
    large = two_magnitudes(chosen, scales)
    parts = (*_index_bits(places, size), chosen >= 0, large)
    return scales, np.concatenate([part.to(torch.uint8).numpy().reshape(-1) for part in parts])


def _index_bits(places: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lower bits of rising indices, and the bitmap of the rest of them."""
    chunks, count = places.shape
    low = low_bits(size, count)
    lower = places[..., None] >> torch.arange(low) & 1
    marks = places
    if low:  # each index shifts the marks of the later ones by one
        marks = (places >> low) + torch.arange(count)
    upper = torch.zeros(chunks, index_bits(size, count) - low * count, dtype=torch.uint8)
    return lower, upper.scatter_(1, marks, 1)


def _decode(bits: Bytes, scales: torch.Tensor, rows: torch.Tensor, count: int) -> None:
    """Set the chosen values of chunks.

    Raises:
        ValueError: The bits are no encoding.
    """
    chunks, size = rows.shape
    low, stream = low_bits(size, count), torch.from_numpy(bits)
    length = index_bits(size, count) - low * count
    ends = [chunks * each for each in (low * count, length, count, count)]
    lower, upper, positive, large = torch.split(stream, ends)
    marks = upper.view(chunks, length).nonzero()[:, 1]
    if len(marks) != chunks * count:
        raise ValueError(f"the bytes name {len(marks)} elements instead of {chunks * count}")
    places = marks.view(chunks, count)
    if low:
        digits = lower.view(chunks, count, low).long() << torch.arange(low)
        places = (places - torch.arange(count) << low) + digits.sum(2)
    if not 0 <= int(places.min()) <= int(places.max()) < size:
        raise ValueError(f"the bytes name elements outside of a chunk of {size}")
    found = torch.where(large.view(chunks, count) > 0, scales[:, 1:], scales[:, :1])
    rows.scatter_(1, places, found.mul_(signs(positive.view(chunks, count))))
