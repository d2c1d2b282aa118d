"""PowerSGD's inner loops in host memory: passes over a dense matrix, and orthonormal columns of P.

The three passes work on a contiguous float32 matrix (n, m) with factors of rank r. Factors with few
rows multiply several times as fast as those with few columns, so P is (r, n) and Q is (r, m). Steps
that read the result of the previous one work in blocks.

All peers must get the same orthonormal columns from the same P, and a matrix of a rank below that
of its factors must not turn rounding errors into columns. Both methods therefore work in float64,
keep the direction of every column, and set a column to zero if it is nearly a combination of
earlier ones. They agree with each other and, for independent columns, with hivemind's.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import numpy as np
import torch

#: Elements handled at once: a MiB of float32, which stays in the cache of a core from the sum to
#: the product.
BLOCK = 2**18
#: Largest ratio of a column's new part to its length at which the column is dropped. P is float32,
#: so a smaller part is rounding error.
TOLERANCE = 1e-6


def begin(
    scale: float,
    feedback: torch.Tensor,
    new: torch.Tensor,
    total: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    q: torch.Tensor,
    p: torch.Tensor,
) -> None:
    """Set the total to ``scale * feedback + new - left @ right``, and P to ``q @ total.T``."""
    rows, columns = total.shape
    height = max(1, BLOCK // columns)
    for row in range(0, rows, height):
        at = slice(row, row + height)
        block = torch.add(new[at], feedback[at], alpha=scale, out=total[at])
        block.addmm_(left[at], right, alpha=-1)
        torch.mm(q, block.t(), out=p[:, at])


def backproject(p: torch.Tensor, total: torch.Tensor, q: torch.Tensor) -> None:
    """Set Q to ``p @ total``."""
    torch.mm(p, total, out=q)


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Set a matrix to ``left @ right``."""
    torch.mm(left, right, out=out)


def host_passes() -> ModuleType:
    """Return the module with compiled passes if numba (the extra ``fast``) is there, else this."""
    try:
        return importlib.import_module("rayhive.compression.powersgd.kernels_numba")
    except ImportError:
        return sys.modules[__name__]


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
    wide = matrices.double()
    largest = wide.abs().amax(dim=1, keepdim=True)
    scaled = wide / torch.where(largest == 0, 1.0, largest)  # so that no square underflows
    bad = ~scaled.isfinite().all(1).all(1)
    columns: torch.Tensor
    columns, upper = torch.linalg.qr(scaled.masked_fill(bad[:, None, None], 0.0))
    new = upper.diagonal(dim1=1, dim2=2)[:, None]
    lengths = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    columns = columns * (new / torch.where(new.abs() > TOLERANCE * lengths, new.abs(), torch.inf))
    columns[bad] = torch.nan
    return columns.to(matrices.dtype)


#: Methods by their names in ``shapes.ORTHOGONALISATIONS``.
METHODS = {"gram_schmidt": gram_schmidt, "qr": qr}


def _lengths(rows: np.ndarray) -> np.ndarray:
    """Return the length of each row, (k, r, 1)."""
    lengths: np.ndarray = np.sqrt(np.einsum("krn,krn->kr", rows, rows))[..., None]
    return lengths
