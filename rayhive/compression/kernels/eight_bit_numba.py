"""Compiled loops of the 8-bit codecs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float32, float64, int64, uint8
from numpy.typing import NDArray

from rayhive.compression.kernels.numba import array, compiled

Values = NDArray[np.float32]
Indices = NDArray[np.uint8]

#: Number of tables used in turn, so that sums do not depend on each other.
_TABLES = 4


@compiled(array(float32), float32, float32, array(uint8, written=True))
def bucket_indices(values: Values, first: float, factor: float, indices: Indices) -> None:
    """Set the bucket of each value: ``first + factor * value``, truncated to 0 to 255."""
    for i in range(len(values)):
        place = first + values[i] * factor
        indices[i] = np.uint8(np.int32(min(max(place, np.float32(0)), np.float32(255))))


@compiled(array(float32), array(uint8), array(float32, written=True))
def look_up(table: Values, indices: Indices, values: Values) -> None:
    """Set values to the entries of a table of 256 at the indices."""
    for i in range(len(values)):
        values[i] = table[indices[i]]


@compiled(
    array(float32), array(uint8), array(float64, 2, written=True), array(int64, 2, written=True)
)
def _add_up(values: Values, indices: Indices, sums: Any, counts: Any) -> None:
    whole = len(values) // 4 * 4
    for i in range(0, whole, 4):
        a, b, c, d = indices[i], indices[i + 1], indices[i + 2], indices[i + 3]
        sums[0, a] += values[i]
        sums[1, b] += values[i + 1]
        sums[2, c] += values[i + 2]
        sums[3, d] += values[i + 3]
        counts[0, a] += 1
        counts[1, b] += 1
        counts[2, c] += 1
        counts[3, d] += 1
    for i in range(whole, len(values)):
        sums[0, indices[i]] += values[i]
        counts[0, indices[i]] += 1


def means(values: Values, indices: Indices) -> Values:
    """Return the mean of the values of each index in 0 to 255; 0 for an index without values."""
    sums, counts = np.zeros((_TABLES, 256)), np.zeros((_TABLES, 256), np.int64)
    _add_up(values, indices, sums, counts)
    found: Values = (sums.sum(0) / np.maximum(counts.sum(0), 1)).astype(np.float32)
    return found
