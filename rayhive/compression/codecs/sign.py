"""Codec of signs."""

from __future__ import annotations

from rayhive.compression.codecs.base import BlockCodec


class Sign(BlockCodec):
    """Codec of signs times the mean magnitude of a block of 1024 elements (arXiv 1901.09847).

    It is meant for error feedback; otherwise each round loses the differences in magnitude.
    """

    name = "sign"
    encoder = "rayhive.compression.kernels.low_bit:OneBit"
    relative_error = 0.65
    element_bits = 1
    block = 1024
    scales = 1
