"""Orthonormalisation of the columns of PowerSGD's P, in stacks of matrices.

All peers must get the same result from the same P, and a matrix of a rank below that of its factors
must not turn rounding errors into columns. Both methods therefore work in float64, keep the
direction of every column, and set a column to zero if it is nearly a combination of earlier ones.
They agree with each other and, for independent columns, with hivemind's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import torch

#: Largest ratio of a column's new part to its length at which the column is dropped. P is float32,
#: so a smaller part is rounding error.
TOLERANCE = 1e-6


def gram_schmidt(matrices: torch.Tensor) -> torch.Tensor:
    """Return the modified Gram-Schmidt process of each matrix (..., n, r).

    A column becomes zero when it depends on earlier ones, and NaN when it is not finite. NumPy has
    less overhead than torch for these many small operations.
    """
    columns = matrices.numpy().swapaxes(1, 2)
    rows = np.ascontiguousarray(columns, dtype=np.float64)  # columns as rows, contiguous in memory
    with np.errstate(invalid="ignore"):
        largest = np.abs(rows).max(axis=2, keepdims=True)
        rows /= np.where(largest == 0, 1.0, largest)
        least = TOLERANCE * _lengths(rows)
        for at in range(rows.shape[1]):
            row, later = rows[:, at : at + 1], rows[:, at + 1 :]
            length = _lengths(row)
            row /= np.where(length > least[:, at : at + 1], length, np.inf)
            later -= np.matmul(later, row.swapaxes(1, 2)) * row
    return torch.from_numpy(np.ascontiguousarray(rows.swapaxes(1, 2), dtype=columns.dtype))


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


#: Methods by their names in ``shapes.ORTHOGONALISATIONS``.
METHODS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"gram_schmidt": gram_schmidt, "qr": qr}
)


def _lengths(rows: np.ndarray) -> np.ndarray:
    """Return the length of each row, (k, r, 1)."""
    lengths: np.ndarray = np.sqrt(np.einsum("krn,krn->kr", rows, rows))[..., None]
    return lengths


def _scaled(matrices: torch.Tensor) -> torch.Tensor:
    """Return float64 columns scaled to a largest element of 1, so that no square underflows."""
    wide = matrices.double()
    largest = wide.abs().amax(dim=1, keepdim=True)
    return wide / torch.where(largest == 0, 1.0, largest)


def _divisor(new: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the divisor that makes a column's new part a unit vector, or zero if negligible."""
    return torch.where(new > TOLERANCE * lengths, new, torch.inf)
