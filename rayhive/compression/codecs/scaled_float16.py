"""Half-precision codec of standardised values."""

from __future__ import annotations

from rayhive.compression.codecs.base import Codec


class ScaledFloat16(Codec):
    """Codec of half precision after standardisation; mean and deviation are sent as float32."""

    name = "scaled_float16"
    encoder = "rayhive.compression.kernels.half:ScaledHalfPrecision"
    relative_error = 2.0**-11
    element_bits = 16
    overhead = 2 * 4
