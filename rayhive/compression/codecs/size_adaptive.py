"""Codec that uses half precision for small tensors and eight bits for large ones."""

from __future__ import annotations

from typing import Any

from rayhive.compression.codecs.base import Codec
from rayhive.compression.codecs.float16 import Float16
from rayhive.compression.codecs.uniform8 import Uniform8


class SizeAdaptive(Codec):
    """Codec that uses ``float16`` below the threshold and ``uniform8`` from it on.

    The threshold is compared with the elements of the *whole tensor*, not of the part. Under
    PowerSGD the tensors are the factors P and Q and the tensors that are not factorised.
    """

    name = "size_adaptive"
    uses_threshold = True
    relative_error = Uniform8.relative_error
    small: Codec = Float16()
    large: Codec = Uniform8()

    def build(self, threshold: int | None = None) -> Any:
        """Return hivemind's switch between the two codecs."""
        from hivemind.compression import SizeAdaptiveCompression

        self.check_threshold(threshold)
        return SizeAdaptiveCompression(
            threshold=threshold, less=self.small.build(), greater_equal=self.large.build()
        )

    def bits(self, tensor_elements: int, threshold: int | None = None) -> float:
        """Return the bits per element of the codec for a tensor of this size."""
        return self.choose(tensor_elements, threshold).bits(tensor_elements)

    def part_bytes(
        self, part_elements: int, tensor_elements: int, threshold: int | None = None
    ) -> int:
        """Return the bytes of a part by the codec for a tensor of this size."""
        return self.choose(tensor_elements, threshold).part_bytes(part_elements, tensor_elements)

    def choose(self, tensor_elements: int, threshold: int | None) -> Codec:
        """Return the codec for a tensor of ``tensor_elements``.

        Raises:
            ConfigError: The threshold is missing or not positive.
        """
        self.check_threshold(threshold)
        return self.large if tensor_elements >= (threshold or 1) else self.small
