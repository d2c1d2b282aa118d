"""Four-bit codec with one scale per block."""

from __future__ import annotations

from rayhive.compression.codecs.base import BlockCodec


class Blockwise4(BlockCodec):
    """Codec with 15 equal steps over a block of 128 elements, scaled by its largest magnitude.

    Zero and the largest magnitude are exact (block-wise quantisation, arXiv 2110.02861).
    """

    name = "blockwise4"
    encoder = "rayhive.compression.kernels.low_bit:FourBit"
    relative_error = 0.15
    element_bits = 4
    block = 128
    scales = 1
