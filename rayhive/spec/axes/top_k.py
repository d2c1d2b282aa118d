"""Density of a sparse codec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rayhive.columns import Column
from rayhive.errors import Problem
from rayhive.registry import CODECS
from rayhive.spec.axes.base import Axis, Values, is_whole

#: Elements of a chunk, as in SparseLoCo (arXiv 2508.15706).
CHUNK = 4096


class TopK(Axis):
    """Number of elements that ``topk`` sends of each chunk of 4096; 64 by default."""

    name = "top_k"
    type = int
    default = 64
    kind = "integer"
    depends_on = ("codec",)
    payload_argument = "top_k"
    column = Column("top_k", "Elements that topk sends of each 4096", "elements", type="count")
    examples = (64, 16)

    def applies(self, values: Values) -> bool:
        """Return whether the codec is sparse."""
        codec = values["codec"]
        known = isinstance(codec, str) and codec in CODECS
        return known and bool(CODECS.get(codec).uses_top_k)

    def needs(self) -> str:
        """Name the sparse codecs."""
        names = [name for name, codec in CODECS.items() if codec.uses_top_k]
        return f"a sparse codec ({', '.join(names)})"

    def check(self, key: str, value: Any) -> Iterator[Problem]:
        """Find a value that is no number of elements."""
        if not is_whole(value, 1, CHUNK):
            yield Problem(key, value, f"a whole number of elements, from 1 to {CHUNK}")

    def apply(self, arguments: dict[str, Any], values: Values) -> None:
        """Build the codec."""
        codec = CODECS.get(values["codec"])(top_k=values[self.name])
        arguments["grad_compression"] = codec.build()

    def label(self, value: Any) -> str:
        """Return the number of elements."""
        return str(value)
