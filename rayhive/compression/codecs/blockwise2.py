"""Two-bit codec with two magnitudes per block."""

from __future__ import annotations

from rayhive.compression.codecs.base import BlockCodec


class Blockwise2(BlockCodec):
    """Codec of signs and two magnitudes for each block of 256 elements.

    The magnitudes are the means of those above and of those up to the block's mean magnitude, close
    to the best quantiser of four levels for normal values (Lloyd and Max).
    """

    name = "blockwise2"
    encoder = "rayhive.compression.kernels.low_bit:TwoBit"
    relative_error = 0.4
    element_bits = 2
    block = 256
    scales = 2
