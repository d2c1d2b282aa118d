"""Eight bits, buckets of equal width."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rayhive.compression.codecs.base import FixedCodec

if TYPE_CHECKING:
    from hivemind.compression import CompressionBase

#: A part's codebook: its length as int64 and 256 float32 values.
CODEBOOK_BYTES = 8 + 256 * 4


class Uniform8(FixedCodec):
    """256 equal buckets over six deviations; each bucket decodes to the mean of its values."""

    name = "uniform8"
    relative_error = 0.05
    element_bits = 8
    overhead: ClassVar[int] = CODEBOOK_BYTES

    def build(self, threshold: int | None = None) -> CompressionBase:
        """Return the quantisation that is right for constant and empty parts too."""
        from rayhive.compression.kernels.eight_bit import loops
        from rayhive.compression.kernels.install import UniformEightBit

        self.check_threshold(threshold)
        loops()  # not in the middle of the first round
        return UniformEightBit()
