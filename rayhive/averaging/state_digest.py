"""Digest of a training state: its norm and a sketch, to compare states without sending them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from rayhive.averaging.outlier_filter import floats, norm_of
from rayhive.averaging.sketch import Sketcher


@dataclass(frozen=True)
class Digest:
    """Norm and sketch of the first tensors of a state.

    Attributes:
        tensors: Number of leading tensors of the state that the digest covers.
        norm: Their Euclidean norm.
        sketch: Their sketch, float32.
    """

    tensors: int
    norm: float
    sketch: bytes

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Digest:
        """Return the digest of tensors."""
        found = floats(tensors)
        sketch = Sketcher([tensor.numel() for tensor in found])(found)
        return cls(len(tensors), norm_of(found), sketch.numpy().tobytes())

    def distance(self, other: Digest) -> float:
        """Return the estimated relative distance ``|a - b| / max(|a|, |b|)``."""
        ours, theirs = (
            torch.frombuffer(bytearray(digest.sketch), dtype=torch.float32)
            for digest in (self, other)
        )
        scale = max(self.norm, other.norm)
        if self.tensors != other.tensors or not math.isfinite(scale):
            return math.inf
        return float((ours - theirs).norm()) / scale if scale else 0.0


def digest_in(metadata: Mapping[str, Any]) -> Digest | None:
    """Return the digest in the metadata of a state; None if it has none."""
    fields = metadata.get("digest")
    return None if fields is None else Digest(*fields)


def with_digest(metadata: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the metadata of a state extended by the digest of its tensors."""
    return {**metadata, "digest": list(astuple(Digest.of(tensors)))}
