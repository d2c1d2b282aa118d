"""Sparse codec of the largest values of each chunk, in two bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rayhive.compression.codecs.base import Codec
from rayhive.errors import ConfigError, Problem
from rayhive.spec.axes.top_k import CHUNK

#: Bytes of a segment besides its chunks: the number of kept elements.
HEADER = 2


def kept(elements: int, top_k: int) -> int:
    """Return how many elements of a chunk are sent: the same fraction of a shorter one, up."""
    return -(-elements * top_k // CHUNK)


def low_bits(elements: int, count: int) -> int:
    """Return the bits of an index that are sent as they are; 0 for a bitmap of all elements.

    Elias and Fano send the lower bits of rising indices, and their upper bits in unary. From a
    quarter of the elements on a bitmap is no longer than that.
    """
    bits = (elements // count).bit_length() - 1
    return bits if bits > 1 else 0


def index_bits(elements: int, count: int) -> int:
    """Return the bits of the indices of some elements of a chunk."""
    low = low_bits(elements, count)
    return count * (low + 1) + (elements - 1 >> low) if low else elements


def chunk_bits(elements: int, top_k: int) -> int:
    """Return the bits of a chunk besides its two magnitudes: indices, signs, and magnitudes."""
    count = kept(elements, top_k)
    return index_bits(elements, count) + 2 * count


def segment_bytes(elements: int, top_k: int) -> int:
    """Return the bytes of a segment."""
    whole, rest = divmod(elements, CHUNK)
    bits = whole * chunk_bits(CHUNK, top_k) + (chunk_bits(rest, top_k) if rest else 0)
    return HEADER + 8 * (whole + bool(rest)) + -(-bits // 8)


class Topk(Codec):
    """Codec of the elements of greatest magnitude in each chunk of 4096 (arXiv 2508.15706).

    They are sent as signs and one of two magnitudes per chunk, the others decode to 0. It is meant
    for error feedback, which sends every element in the end.

    Args:
        top_k: Number of elements sent of each chunk, from 1 to 4096.

    Raises:
        ConfigError: It is out of range.
    """

    name = "topk"
    relative_error = 0.97
    element_bits = 2
    block = CHUNK
    of_gradients = True
    keeps = False
    uses_top_k = True

    def __init__(self, top_k: int = 64) -> None:
        if not 1 <= top_k <= CHUNK:
            raise ConfigError(Problem("top_k", top_k, f"a whole number from 1 to {CHUNK}"))
        self.top_k = int(top_k)

    def build(self, threshold: int | None = None) -> Any:
        """Return the object that encodes."""
        from rayhive.compression.kernels.sparse import TopK

        self.check_threshold(threshold)
        return TopK(self.top_k)

    def bits(self, tensor_elements: int, threshold: int | None = None) -> float:
        """Return the bits per element of a whole chunk."""
        self.check_threshold(threshold)
        return 8 * (segment_bytes(CHUNK, self.top_k) - HEADER) / CHUNK

    def part_bytes(
        self, part_elements: int, tensor_elements: int, threshold: int | None = None
    ) -> int:
        """Return the bytes of the header, the magnitudes, the indices and the values."""
        self.check_threshold(threshold)
        return segment_bytes(part_elements, self.top_k)

    def sent(self, sizes: Iterable[int]) -> int:
        """Return how many elements of tensors of these sizes are sent.

        It never falls with ``top_k``, so equal numbers mean equal messages.
        """
        chunks = (divmod(size, CHUNK) for size in sizes)
        return sum(n * self.top_k + kept(rest, self.top_k) for n, rest in chunks)
