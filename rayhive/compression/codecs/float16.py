"""Half-precision codec."""

from __future__ import annotations

from rayhive.compression.codecs.base import Codec


class Float16(Codec):
    """Codec of IEEE half precision: 2 bytes per element, finite values clamped to ±65504.

    Infinities stay infinite.
    """

    name = "float16"
    encoder = "rayhive.compression.kernels.half:HalfPrecision"
    relative_error = 2.0**-11
    element_bits = 16
