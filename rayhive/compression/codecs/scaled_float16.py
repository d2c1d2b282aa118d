"""Half precision of standardised values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayhive.compression.codecs.base import FixedCodec

if TYPE_CHECKING:
    from hivemind.compression import CompressionBase


class ScaledFloat16(FixedCodec):
    """Half precision after mean and deviation are taken out; both ride along as float32."""

    name = "scaled_float16"
    relative_error = 2.0**-11
    element_bits = 16
    overhead = 2 * 4

    def build(self, threshold: int | None = None) -> CompressionBase:
        """Return scaled half precision that is right for tiny values and scalars too."""
        from rayhive.compression.kernels.install import ScaledHalfPrecision

        self.check_threshold(threshold)
        return ScaledHalfPrecision()
