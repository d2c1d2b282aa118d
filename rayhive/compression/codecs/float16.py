"""Half-precision codec."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayhive.compression.codecs.base import FixedCodec

if TYPE_CHECKING:
    from hivemind.compression import CompressionBase


class Float16(FixedCodec):
    """Codec of IEEE half precision: 2 bytes per element, finite values clamped to ±65504."""

    name = "float16"
    relative_error = 2.0**-11
    element_bits = 16

    def build(self, threshold: int | None = None) -> CompressionBase:
        """Return half precision that preserves infinities."""
        from rayhive.compression.kernels.install import HalfPrecision

        self.check_threshold(threshold)
        return HalfPrecision()
