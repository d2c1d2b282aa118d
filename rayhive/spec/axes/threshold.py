"""Size from which an adaptive codec compresses a tensor to 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.registry import CODECS
from rayhive.spec.axes.base import Axis, Distribution, Range, Values, is_whole
from rayhive.spec.model import MOST


class Threshold(Axis):
    """Elements of a tensor from which ``size_adaptive`` uses 8 bits.

    The default is that of hivemind's documented usage, which compresses tensors of more than
    2**16 elements to 8 bits.
    """

    name = "threshold"
    type = int
    default = 2**16 + 1
    kind = "integer"
    depends_on = ("codec",)
    drawn_after = ("powersgd_rank", "min_compression_ratio")
    payload_argument = "threshold"
    column = Column(
        "threshold", "Size from which size_adaptive uses 8 bits", "elements", type="count"
    )
    examples = (256, 2**16 + 1)

    def applies(self, values: Values) -> bool:
        """Return whether the codec takes a threshold."""
        codec = values["codec"]
        known = isinstance(codec, str) and codec in CODECS
        return known and bool(CODECS.get(codec).uses_threshold)

    def needs(self) -> str:
        """Name the codecs that take a threshold."""
        names = [name for name, codec in CODECS.items() if codec.uses_threshold]
        return f"a codec that has a threshold ({', '.join(names)})"

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a threshold that is no number of elements."""
        if not is_whole(value, 1, MOST):
            yield Problem(key, value, f"a whole number of elements, from 1 to {MOST}")

    def narrowed(self, distribution: Range, sizes: Sequence[int]) -> Distribution:
        """Return the part of a range in which a threshold divides the tensors.

        Under PowerSGD the sizes are those of the factors, which are far smaller than the
        gradients: most of a range that suits gradients has no effect then.
        """
        least, most = deciding_range(sizes)
        low = max(math.ceil(distribution.low), least)
        high = min(math.floor(distribution.high), most)
        if low <= high:
            return Range(low=low, high=high, log=distribution.log)
        # the whole range lies on one side of all sizes
        all_large = distribution.high < least
        return (math.floor(distribution.high) if all_large else math.ceil(distribution.low),)

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Build the codec with its threshold."""
        codec = CODECS.get(values["codec"])()
        arguments["grad_compression"] = codec.build(values[self.name])

    def label(self, value: Any) -> str:
        """Return the number of elements."""
        return str(value)


def deciding_range(sizes: Sequence[int]) -> tuple[int, int]:
    """Return the range outside of which a threshold acts like an end of it [elements].

    Args:
        sizes: Elements of each tensor, at least one.

    Returns:
        ``low``, at and below which every tensor is large, and ``high``, at and above which none
        is. Both are sizes of tensors, or one more.
    """
    return max(1, min(sizes)), max(sizes) + 1
