"""Codec of the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem, unknown
from rayhive.registry import CODECS
from rayhive.spec.axes.base import Axis, Values


class Codec(Axis):
    """Codec with which peers send gradients, by its registered name."""

    name = "codec"
    type = str
    default = "none"
    kind = "choice"
    payload_argument = "codec"
    column = Column("codec", "Gradient codec", type="text")
    examples = ("none", "float16", "size_adaptive", "topk")

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find an unknown codec, or one whose optional dependency is not installed."""
        if not isinstance(value, str) or value not in CODECS:
            yield unknown(key, value, CODECS.names())
            return
        codec = CODECS.get(value)
        if not codec.available():
            allowed = f"a codec whose dependency is installed: install {codec.requires}"
            yield Problem(key, value, allowed)

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Build the codec, unless an axis of its own does: ``threshold`` or ``top_k``."""
        codec = CODECS.get(values[self.name])()
        if not (codec.uses_threshold or codec.uses_top_k):
            arguments["grad_compression"] = codec.build()

    def label(self, value: Any) -> str:
        """Return the name of the codec."""
        return str(value)
