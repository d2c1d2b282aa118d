"""Sketch of the direction of many tensors in a few numbers, at the cost of one read.

Like a count-sketch (see :mod:`rayhive.peer.weights_sketch`) it is linear and keeps inner products
in expectation. All elements are written in rows of :data:`COLUMNS`, and the random sign of an
element is the product of a sign of its row and one of its column. One matrix-vector product
therefore adds up the rows, and no sign is stored per element.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BUCKETS = 256
COLUMNS = 4096


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
        """Return the sketch, :data:`BUCKETS` numbers."""
        line = torch.zeros(COLUMNS)
        for signs, tensor in zip(self._rows, tensors, strict=True):
            flat = tensor.detach().reshape(-1).float()
            whole = len(flat) // COLUMNS
            if whole:
                line += signs[:whole] @ flat[: whole * COLUMNS].view(whole, COLUMNS)
            rest = flat[whole * COLUMNS :]
            line[: len(rest)] += signs[whole] * rest
        return (self._columns * line).view(-1, BUCKETS).sum(0)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the cosine between two vectors; 0 if one of them is 0."""
    product = float(a.norm() * b.norm())
    return float(a @ b) / product if product else 0.0


def _signs(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2, (count,), generator=generator).float() * 2 - 1
