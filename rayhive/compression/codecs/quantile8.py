"""Eight-bit codec with buckets of equal population."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayhive.compression.codecs.base import FixedCodec
from rayhive.compression.codecs.uniform8 import CODEBOOK_BYTES

if TYPE_CHECKING:
    from hivemind.compression import CompressionBase


class Quantile8(FixedCodec):
    """Codec with 256 buckets between quantiles: the slowest one, for heavy tails."""

    name = "quantile8"
    relative_error = 0.1
    element_bits = 8
    overhead = CODEBOOK_BYTES

    def build(self, threshold: int | None = None) -> CompressionBase:
        """Return the quantisation that also handles empty parts."""
        from rayhive.compression.kernels.eight_bit import loops
        from rayhive.compression.kernels.install import QuantileEightBit

        self.check_threshold(threshold)
        loops()  # compiled now, not during the first round
        return QuantileEightBit()
