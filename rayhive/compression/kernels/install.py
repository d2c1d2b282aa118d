"""Replacement of hivemind's codecs by corrected and faster ones with the same wire format.

Every class keeps its parent's ``compression_type`` and layout, so that plain hivemind peers and
these decode each other's messages. The differences, each with its test, are listed in
``docs/compression.md``; apart from them the bytes are equal.

A peer decodes with the codec that hivemind's table lists under a message's type, and reducers
encode differences with that codec. :func:`install` therefore replaces the codecs in the table, in
the averager's process.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hivemind.compression import CompressionBase, quantization, serialization

from rayhive.compression.kernels.eight_bit import QuantileEightBit, UniformEightBit
from rayhive.compression.kernels.half import HalfPrecision, ScaledHalfPrecision

#: hivemind's table of codecs, by the name of the wire type.
KNOWN: dict[str, CompressionBase] = serialization._BASE_COMPRESSION_TYPES


def table() -> dict[str, CompressionBase]:
    """Return the replacements in hivemind's table, by the name of the wire type."""
    return {
        "FLOAT16": HalfPrecision(),
        "MEANSTD_16BIT": ScaledHalfPrecision(),
        "UNIFORM_8BIT": UniformEightBit(),
        "QUANTILE_8BIT": QuantileEightBit(),
    }


def install() -> None:
    """Answer and decode with these codecs in this process from now on.

    hivemind's own quantile codec gets a new thread pool as well: the pool that its module made
    before a fork has no threads afterwards, and calls to it would never return.
    """
    KNOWN.update(table())
    quantization.EXECUTOR = ThreadPoolExecutor(thread_name_prefix="quantiles")
