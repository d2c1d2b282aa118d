"""Compiled versions of the passes in :mod:`rayhive.compression.powersgd.kernels`.

torch computes the sum, the difference and the product of a block one after the other. Here a row
goes through all three while it is in the first cache.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numba import float32
from numpy.typing import NDArray

from rayhive.compression.kernels.numba import ANY_ORDER, array, compiled

Matrix: TypeAlias = NDArray[np.float32]

#: Rows and columns handled at once, as many factors as fit into registers.
WIDTH = 4
_READ, _WRITTEN = array(float32, 2), array(float32, 2, written=True)


@compiled(float32, _READ, _READ, _WRITTEN, _READ, _READ, _READ, _WRITTEN, fastmath=ANY_ORDER)
def _begin(
    scale: np.float32,
    feedback: Matrix,
    new: Matrix,
    total: Matrix,
    left: Matrix,
    right: Matrix,
    q: Matrix,
    p: Matrix,
) -> None:
    rows, columns = total.shape
    for i in range(rows):
        old, fresh, row = feedback[i], new[i], total[i]
        for k in range(0, len(q), 4):
            a, b, c, d = left[i, k], left[i, k + 1], left[i, k + 2], left[i, k + 3]
            w, x, y, z = right[k], right[k + 1], right[k + 2], right[k + 3]
            for j in range(columns):
                before = scale * old[j] + fresh[j] if k == 0 else row[j]
                row[j] = before - (a * w[j] + b * x[j] + c * y[j] + d * z[j])
        for k in range(0, len(q), 4):
            w, x, y, z = q[k], q[k + 1], q[k + 2], q[k + 3]
            a = b = c = d = np.float32(0)
            for j in range(columns):
                v = row[j]
                a += v * w[j]
                b += v * x[j]
                c += v * y[j]
                d += v * z[j]
            p[k, i], p[k + 1, i], p[k + 2, i], p[k + 3, i] = a, b, c, d


@compiled(_READ, _READ, _WRITTEN, fastmath=ANY_ORDER)
def _backproject(p: Matrix, total: Matrix, q: Matrix) -> None:
    rows, columns = total.shape
    q[:] = 0
    for i in range(0, rows, 4):
        # Past the last row p is zero.
        e, f = total[i], total[min(i + 1, rows - 1)]
        g, h = total[min(i + 2, rows - 1)], total[min(i + 3, rows - 1)]
        for k in range(len(q)):
            a, b, c, d = p[k, i], p[k, i + 1], p[k, i + 2], p[k, i + 3]
            column = q[k]
            for j in range(columns):
                column[j] += a * e[j] + b * f[j] + c * g[j] + d * h[j]


@compiled(_READ, _READ, _WRITTEN, fastmath=ANY_ORDER)
def _multiply(left: Matrix, right: Matrix, out: Matrix) -> None:
    rows, columns = out.shape
    for i in range(rows):
        row = out[i]
        for k in range(0, len(right), 4):
            a, b, c, d = left[i, k], left[i, k + 1], left[i, k + 2], left[i, k + 3]
            w, x, y, z = right[k], right[k + 1], right[k + 2], right[k + 3]
            for j in range(columns):
                before = row[j] if k else np.float32(0)
                row[j] = before + a * w[j] + b * x[j] + c * y[j] + d * z[j]


def begin(scale: float, *matrices: torch.Tensor) -> None:
    """Set total and P as :func:`rayhive.compression.powersgd.kernels.begin`, from its arguments."""
    feedback, new, total, left, right, q, p = (_array(matrix) for matrix in matrices)
    left, right, q, found = _padded(left, 1), _padded(right, 0), _padded(q, 0), _padded(p, 0)
    _begin(np.float32(scale), feedback, new, total, left, right, q, found)
    p[:] = found[: len(p)]


def backproject(p: torch.Tensor, total: torch.Tensor, q: torch.Tensor) -> None:
    """Set Q to ``p @ total``."""
    _backproject(_padded(_array(p), 1), _array(total), _array(q))


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Set a matrix to ``left @ right``."""
    _multiply(_padded(_array(left), 1), _padded(_array(right), 0), _array(out))


def _array(matrix: torch.Tensor) -> Matrix:
    array: Matrix = matrix.detach().numpy()
    return array


def _padded(factors: Matrix, axis: int) -> Matrix:
    """Return factors with zeros up to the next multiple of :data:`WIDTH`."""
    missing = -factors.shape[axis] % WIDTH
    widths = [(0, missing if at == axis else 0) for at in range(factors.ndim)]
    return np.pad(factors, widths) if missing else np.ascontiguousarray(factors)
