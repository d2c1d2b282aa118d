"""Summaries of many tensors in a few numbers, each at the cost of one read.

A sketch tells the direction of tensors. Like a count-sketch (see
:mod:`rayhive.peer.measurements`) it is linear and keeps inner products in expectation. All
elements are written in rows of :data:`COLUMNS`, and the random sign of an element is the product of
a sign of its row and one of its column. One matrix-vector product therefore adds up the rows, and
no sign is stored per element. A digest is a norm and a sketch: peers compare their states by
digests, without sending the states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

#: Numbers of a sketch, and elements of a row.
BUCKETS, COLUMNS = 256, 4096


class Sketcher:
    """Sketches of tensors of fixed sizes.

    Args:
        sizes: Elements of each tensor.
        seed: Seed of the signs; peers that are compared must use the same.
    """

    def __init__(self, sizes: Sequence[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._rows = [_signs(size // COLUMNS + 1, generator) for size in sizes]
        self._columns = _signs(COLUMNS, generator)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sketch, :data:`BUCKETS` numbers, on the host."""
        line = torch.zeros(COLUMNS, dtype=torch.float32)
        for signs, tensor in zip(self._rows, tensors, strict=True):
            flat = tensor.detach().reshape(-1).float()
            whole = len(flat) // COLUMNS
            if whole:
                rows = flat[: whole * COLUMNS].view(whole, COLUMNS)
                line += (signs[:whole].to(rows.device) @ rows).cpu()
            rest = flat[whole * COLUMNS :].cpu()
            line[: len(rest)] += signs[whole] * rest
        return (self._columns * line).view(-1, BUCKETS).sum(0)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the cosine between two vectors; 0 if one of them is 0."""
    product = float(a.norm() * b.norm())
    return float(a @ b) / product if product else 0.0


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2, (count,), generator=generator).float() * 2 - 1


def floats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the floating-point tensors, detached: only these can be corrupt."""
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the Euclidean norm of all tensors together; inf or NaN if an element is not finite."""
    narrow = (t.float() if t.dtype == torch.float64 else t for t in tensors)
    norms = (float(torch.linalg.vector_norm(t, dtype=torch.float32)) for t in narrow)
    return math.sqrt(sum(norm * norm for norm in norms))


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
        finite = math.isfinite(self.norm) and math.isfinite(other.norm)
        if self.tensors != other.tensors or not finite:
            return math.inf
        scale = max(self.norm, other.norm)
        return float((ours - theirs).norm()) / scale if scale else 0.0


def digest_in(metadata: Mapping[str, Any]) -> Digest | None:
    """Return the digest in the metadata of a state; None if it has none."""
    fields = metadata.get("digest")
    return None if fields is None else Digest(*fields)


def with_digest(metadata: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the metadata of a state extended by the digest of its tensors."""
    return {**metadata, "digest": list(astuple(Digest.of(tensors)))}
