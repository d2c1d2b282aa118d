"""Codec without compression."""

from __future__ import annotations

from rayhive.compression.codecs.base import Codec


class Plain(Codec):
    """Codec of plain float32: 4 bytes per element."""

    name = "none"
    encoder = "hivemind.compression:NoCompression"
    relative_error = 0.0
    element_bits = 32  # hivemind averages in float32
