"""Eight-bit codec with buckets of equal width."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rayhive.compression.codecs.base import FixedCodec

if TYPE_CHECKING:
    from hivemind.compression import CompressionBase

#: A part's codebook: its length as int64 and 256 float32 values.
CODEBOOK_BYTES = 8 + 256 * 4


class Uniform8(FixedCodec):
    """Codec with 256 equal buckets over six deviations, decoded to the means of their values."""

    name = "uniform8"
    relative_error = 0.05
    element_bits = 8
    overhead: ClassVar[int] = CODEBOOK_BYTES

    def build(self, threshold: int | None = None) -> CompressionBase:
        """Return the quantisation that also handles constant and empty parts."""
        from rayhive.compression.kernels.eight_bit import loops
        from rayhive.compression.kernels.install import UniformEightBit

        self.check_threshold(threshold)
        loops()  # compiled now, not during the first round
        return UniformEightBit()
