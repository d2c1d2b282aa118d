"""hivemind's codecs, right where hivemind's are wrong, faster, and the same on the wire.

Every class keeps its parent's ``compression_type`` and layout, so that a plain hivemind peer
decodes what these encode and the other way round. Where hivemind is right the bytes are equal.
What differs, each point with the test that shows it, stands in ``docs/compression.md``.

A reducer answers with the codec that hivemind's table lists under the sender's type, not with
the sender's object: :func:`install` puts these into that table, in the averager's own process.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hivemind.compression import CompressionBase, quantization, serialization

from rayhive.compression.kernels.eight_bit import (
    BlockwiseEightBit,
    QuantileEightBit,
    UniformEightBit,
)
from rayhive.compression.kernels.half import HalfPrecision, ScaledHalfPrecision

__all__ = [
    "BlockwiseEightBit",
    "HalfPrecision",
    "QuantileEightBit",
    "ScaledHalfPrecision",
    "UniformEightBit",
    "install",
    "table",
]


def table() -> dict[str, CompressionBase]:
    """Return what :func:`install` replaces in hivemind's table, by the name of the wire type."""
    return {
        "FLOAT16": HalfPrecision(),
        "MEANSTD_16BIT": ScaledHalfPrecision(),
        "UNIFORM_8BIT": UniformEightBit(),
        "QUANTILE_8BIT": QuantileEightBit(),
        "BLOCKWISE_8BIT": BlockwiseEightBit(),
    }


def install() -> None:
    """Answer and decode with these codecs in this process from now on.

    It also gives hivemind's quantiles, for those who pass hivemind's own codec, a thread pool of
    this process: the one that the module made before a fork has no threads after it, and would
    wait for them for ever.
    """
    known: dict[str, Any] = serialization._BASE_COMPRESSION_TYPES
    known.update(table())
    quantization.EXECUTOR = ThreadPoolExecutor(thread_name_prefix="quantiles")
