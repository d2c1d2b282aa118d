"""Codec without compression."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayhive.compression.codecs.base import DENSE_BITS, FixedCodec

if TYPE_CHECKING:
    from hivemind.compression import CompressionBase


class Plain(FixedCodec):
    """Codec of plain float32: 4 bytes per element."""

    name = "none"
    lossless = True
    relative_error = 0.0
    element_bits = DENSE_BITS

    def build(self, threshold: int | None = None) -> CompressionBase:
        """Return hivemind's pass-through codec."""
        from hivemind.compression import NoCompression

        self.check_threshold(threshold)
        return NoCompression()
