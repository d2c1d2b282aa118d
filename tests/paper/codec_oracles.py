"""Error feedback with the codecs of the papers, in NumPy and float64, with nothing of rayhive's.

Workers compress with memory (EF-signSGD, algorithm 1 of arXiv 1901.09847; for sums over samples,
because workers have unequal batches), and a server compresses the average with a memory of its own
(DoubleSqueeze, algorithm 1 of arXiv 1905.05957). Here every worker is the server of some elements,
and pays the server's memory with its own next update; it sends itself no message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Compressor = Callable[[Array], Array]


def in_blocks(size: int, compress: Compressor) -> Compressor:
    """Apply a compressor to each block of a flat tensor."""

    def whole(values: Array) -> Array:
        blocks = [compress(values[at : at + size]) for at in range(0, len(values), size)]
        return np.concatenate([np.zeros(0), *blocks])

    return whole


def scaled_sign(p: Array) -> Array:
    """Algorithm 1 of 1901.09847, line 6: Δ = (‖p‖₁ / d) · sign(p)."""
    return np.full_like(p, np.abs(p).sum() / len(p)) * np.where(p >= 0, 1.0, -1.0)


def absmax(p: Array) -> Array:
    """Block-wise quantisation (2110.02861, section 2) to the codes -7 ... 7 of four bits."""
    largest = np.abs(p).max()
    return np.round(p / largest * 7) / 7 * largest if largest else np.zeros_like(p)


def two_means(p: Array) -> Array:
    """Signs, and the mean of the magnitudes on either side of their mean."""
    sizes = np.abs(p)
    found = np.empty_like(p)
    for side in (sizes > sizes.mean(), sizes <= sizes.mean()):
        found[side] = sizes[side].mean() if side.any() else 0.0
    return found * np.where(p >= 0, 1.0, -1.0)


def top_64(p: Array) -> Array:
    """SparseLoCo (2508.15706): the largest 64 of 4096 values of a chunk, quantised to two bits."""
    largest = np.argsort(-np.abs(p), kind="stable")[: -(-len(p) * 64 // 4096)]
    found = np.zeros_like(p)
    found[largest] = two_means(p[largest])
    return found


COMPRESSORS: dict[str, Compressor] = {
    "blockwise4": in_blocks(128, absmax),
    "blockwise2": in_blocks(256, two_means),
    "sign": in_blocks(1024, scaled_sign),
    "topk": in_blocks(4096, top_64),
}


class Workers:
    """Memories of all workers, for one list of tensors.

    Args:
        servers: For each tensor, the worker that is the server of each element.
        count: Number of workers.
        compress: Compressor of a flat tensor.
    """

    def __init__(self, servers: list[Any], count: int, compress: Compressor) -> None:
        self._servers, self._compress = servers, compress
        self.sums = [[np.zeros(len(each)) for each in servers] for _ in range(count)]

    def update(self, gradients: list[list[Array]], weights: list[float]) -> list[Array]:
        """Return the update of a round, which every worker applies, and keep the errors."""
        total, applied = sum(weights), []
        for tensor, servers in enumerate(self._servers):
            workers = zip(gradients, weights, self.sums, strict=True)
            corrected = [own[tensor] + e[tensor] / weight for own, weight, e in workers]
            sent = [np.where(servers == at, p, self._compress(p)) for at, p in enumerate(corrected)]
            pairs = zip(weights, sent, strict=True)
            average = sum(weight * each for weight, each in pairs) / total
            applied.append(self._compress(average))
            missed = total * (average - applied[-1])
            for at, weight in enumerate(weights):
                error = weight * (corrected[at] - sent[at])
                self.sums[at][tensor] = np.where(servers == at, missed, error)
        return applied
