"""Sketch of all parameters, from which the distance between replicas is estimated.

A count-sketch (Charikar, Chen and Farach-Colton, 2002, "Finding frequent items in data streams")
adds every element, with a random sign, to one of a few buckets. It is linear, and the squared norm
of a vector's sketch is an unbiased estimate of the vector's squared norm (relative standard
deviation about ``sqrt(2 / buckets)``). So the sketches of two peers give the distance between their
weights, and the weights are never sent. Equal weights have equal sketches, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

BUCKETS = 64


class WeightsSketch:
    """Function from the values of fixed tensors to their sketch.

    Args:
        tensors: The parameters; only their shapes and order matter.
        buckets: Length of the sketch.
        seed: Seed of the hash; sketches that are compared must use the same seed.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], buckets: int = BUCKETS, seed: int = 0
    ) -> None:
        elements = sum(tensor.numel() for tensor in tensors)
        generator = torch.Generator().manual_seed(seed)
        self.buckets = buckets
        self._bucket = torch.randint(buckets, (elements,), generator=generator, dtype=torch.int32)
        self._sign = torch.randint(2, (elements,), generator=generator, dtype=torch.int8) * 2 - 1

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor]) -> tuple[float, list[float], bool]:
        """Return (Euclidean norm, sketch of ``buckets`` numbers, whether all are finite)."""
        flat = torch.cat([tensor.detach().reshape(-1).cpu().double() for tensor in tensors])
        sketch = torch.zeros(self.buckets, dtype=torch.float64)
        sketch.index_add_(0, self._bucket, flat * self._sign)
        norm = float(flat.norm())
        return norm, sketch.tolist(), math.isfinite(norm)


def relative_distance(
    norm_a: float, sketch_a: Sequence[float], norm_b: float, sketch_b: Sequence[float]
) -> float:
    """Estimate ``|a - b| / max(|a|, |b|)`` from two sketches."""
    scale = max(norm_a, norm_b)
    return math.dist(sketch_a, sketch_b) / scale if scale else 0.0
