"""Eight-bit codec with buckets of equal population."""

from __future__ import annotations

from rayhive.compression.codecs.base import CODEBOOK_BYTES, Codec


class Quantile8(Codec):
    """Codec with 256 buckets between quantiles: the slowest one, for heavy tails."""

    name = "quantile8"
    encoder = "rayhive.compression.kernels.eight_bit:QuantileEightBit.compiled"
    relative_error = 0.1
    element_bits = 8
    overhead = CODEBOOK_BYTES
