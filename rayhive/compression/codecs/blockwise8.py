"""Eight-bit codec with one scale per block, by bitsandbytes."""

from __future__ import annotations

from rayhive.compression.codecs.base import CODEBOOK_BYTES, Codec

#: hivemind's block.
BLOCK_ELEMENTS = 4096


class Blockwise8(Codec):
    """Codec with a common codebook and one float32 scale per block of 4096 elements.

    hivemind ignores the scales when it cuts parts.
    """

    name = "blockwise8"
    encoder = "hivemind.compression:BlockwiseQuantization"
    relative_error = 0.02
    element_bits = 8
    overhead = 8 + CODEBOOK_BYTES  # the number of scales as int64
    requires = "bitsandbytes"

    def part_bytes(
        self, part_elements: int, tensor_elements: int, threshold: int | None = None
    ) -> int:
        """Return the bytes of elements, scales and header."""
        scales = -(-part_elements // BLOCK_ELEMENTS)
        return super().part_bytes(part_elements, tensor_elements, threshold) + 4 * scales
