"""Codec of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem, unknown
from rayhive.registry import CODECS
from rayhive.spec.axes.base import Axis, Values


class StateCodec(Axis):
    """Codec with which peers average parameters, by its registered name."""

    name = "state_codec"
    type = str
    default = "none"
    kind = "choice"
    column = Column("state_codec", "Codec of the parameters", type="text")
    examples = ("none", "float16")

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a codec that is unknown, not installed, of gradients only, or takes a threshold."""
        names = [
            name
            for name, codec in CODECS.items()
            if not (codec.uses_threshold or codec.of_gradients)
        ]
        if not isinstance(value, str) or value not in names:
            yield unknown(key, value, names)
            return
        codec = CODECS.get(value)
        if not codec.available():
            yield Problem(
                key, value, f"a codec whose dependency is installed: install {codec.requires}"
            )

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Build the codec."""
        arguments["state_averaging_compression"] = CODECS.get(values[self.name])().build()

    def label(self, value: Any) -> str:
        """Return the name of the codec, or nothing without one."""
        return "" if value == "none" else f"state-{value}"
