"""Orthonormal columns for PowerSGD's P, in stacks of matrices.

All peers must get the same from the same P, and a matrix of a rank below that of its factors must
not turn rounding errors into columns. So both ways work in float64, keep the direction of every
column, and set a column to zero that hardly differs from a combination of those before it. They
agree with each other and, for columns that are independent, with hivemind's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

#: A column is dropped when what is new in it is at most this share of its length. P is float32:
#: less than this is the rounding of its own making.
TOLERANCE = 1e-6


@torch.no_grad()
def gram_schmidt(matrices: torch.Tensor) -> torch.Tensor:
    """Return the modified Gram-Schmidt process of each matrix (..., n, r).

    A column becomes zero when it depends on those before it, and stays NaN when it is not finite.
    """
    rows = _scaled(matrices).transpose(1, 2).contiguous()  # columns as rows: they lie together
    lengths = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
    for at in range(rows.shape[1]):
        row, later = rows[:, at : at + 1], rows[:, at + 1 :]
        row.div_(_divisor(torch.linalg.vector_norm(row, dim=2, keepdim=True), lengths[:, at, None]))
        if later.shape[1]:
            later.baddbmm_(later @ row.transpose(1, 2), row, alpha=-1)
    return rows.transpose(1, 2).to(matrices.dtype)


@torch.no_grad()
def qr(matrices: torch.Tensor) -> torch.Tensor:
    """Return the same by Householder reflections (LAPACK's QR), with the signs of Gram-Schmidt."""
    scaled = _scaled(matrices)
    bad = ~scaled.isfinite().all(1).all(1)
    columns: torch.Tensor
    columns, upper = torch.linalg.qr(scaled.masked_fill(bad[:, None, None], 0.0))
    new = upper.diagonal(dim1=1, dim2=2)[:, None]
    lengths = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    columns = columns * (new / _divisor(new.abs(), lengths))
    columns[bad] = torch.nan
    return columns.to(matrices.dtype)


#: Each by its name among ``powersgd_shapes.ORTHOGONALISATIONS``.
METHODS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"gram_schmidt": gram_schmidt, "qr": qr}
)


def _scaled(matrices: torch.Tensor) -> torch.Tensor:
    """Return float64 columns whose largest element is 1, so that no square is lost."""
    wide = matrices.double()
    largest = wide.abs().amax(dim=1, keepdim=True)
    return wide / torch.where(largest == 0, 1.0, largest)


def _divisor(new: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return what makes a column's new part a unit vector, or zero if it is negligible."""
    return torch.where(new > TOLERANCE * lengths, new, torch.inf)
