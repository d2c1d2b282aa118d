"""Eight-bit codec with buckets of equal width."""

from __future__ import annotations

from rayhive.compression.codecs.base import CODEBOOK_BYTES, Codec


class Uniform8(Codec):
    """Codec with 256 equal buckets over six deviations, decoded to the means of their values."""

    name = "uniform8"
    encoder = "rayhive.compression.kernels.eight_bit:UniformEightBit.compiled"
    relative_error = 0.05
    element_bits = 8
    overhead = CODEBOOK_BYTES
