"""No compression: every element as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayhive.compression.codecs.base import DENSE_BITS, FixedCodec

if TYPE_CHECKING:
    from hivemind.compression import CompressionBase


class Plain(FixedCodec):
    """Float32 as it is: 4 bytes an element."""

    name = "none"
    lossless = True
    relative_error = 0.0
    element_bits = DENSE_BITS

    def build(self, threshold: int | None = None) -> CompressionBase:
        """Return hivemind's own pass-through."""
        from hivemind.compression import NoCompression

        self.check_threshold(threshold)
        return NoCompression()
