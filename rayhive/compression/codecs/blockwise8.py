"""Eight-bit codec with one scale per block, by bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayhive.compression.codecs.base import Codec

if TYPE_CHECKING:
    from hivemind.compression import CompressionBase

#: hivemind's block.
BLOCK_ELEMENTS = 4096
#: Two lengths as int64 and a codebook of 256 float32 values.
HEADER_BYTES = 2 * 8 + 256 * 4


class Blockwise8(Codec):
    """Codec with a common codebook and one float32 scale per block of 4096 elements."""

    name = "blockwise8"
    relative_error = 0.02
    requires = "bitsandbytes"

    def build(self, threshold: int | None = None) -> CompressionBase:
        """Return hivemind's quantisation with a decoder that works with numpy 2.4."""
        from rayhive.compression.kernels.install import BlockwiseEightBit

        self.check_threshold(threshold)
        return BlockwiseEightBit()

    def bits(self, tensor_elements: int, threshold: int | None = None) -> float:
        """Return 8, as hivemind ignores the scales when it cuts parts."""
        self.check_threshold(threshold)
        return 8.0

    def part_bytes(
        self, part_elements: int, tensor_elements: int, threshold: int | None = None
    ) -> int:
        """Return the bytes of elements, scales and header."""
        self.check_threshold(threshold)
        blocks = -(-part_elements // BLOCK_ELEMENTS)
        return HEADER_BYTES + 4 * blocks + part_elements
