"""Half-precision codec of standardised values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayhive.compression.codecs.base import FixedCodec

if TYPE_CHECKING:
    from hivemind.compression import CompressionBase


class ScaledFloat16(FixedCodec):
    """Codec of half precision after standardisation; mean and deviation are sent as float32."""

    name = "scaled_float16"
    relative_error = 2.0**-11
    element_bits = 16
    overhead = 2 * 4

    def build(self, threshold: int | None = None) -> CompressionBase:
        """Return scaled half precision that also handles tiny values and scalars."""
        from rayhive.compression.kernels.install import ScaledHalfPrecision

        self.check_threshold(threshold)
        return ScaledHalfPrecision()
