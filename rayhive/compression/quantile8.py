"""Eight bits, buckets of equal population."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayhive.compression.codec import FixedCodec
from rayhive.compression.uniform8 import CODEBOOK_BYTES

if TYPE_CHECKING:
    from hivemind.compression import CompressionBase


class Quantile8(FixedCodec):
    """256 buckets between quantiles; the slowest codec, and the one for heavy tails."""

    name = "quantile8"
    relative_error = 0.1
    element_bits = 8
    overhead = CODEBOOK_BYTES

    def build(self, threshold: int | None = None) -> CompressionBase:
        """Return the quantisation that is right for empty parts too."""
        from rayhive.compression.wire import QuantileEightBit
        from rayhive.compression.wire_eight import loops

        self.check_threshold(threshold)
        loops()  # not in the middle of the first round
        return QuantileEightBit()
