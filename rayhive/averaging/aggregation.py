"""Aggregation rules of a reducer for the parts of its group.

The mean is the default and needs no rule. The other rules bound the influence of one peer on the
result, at the price of a bias where honest peers differ. Each rule works on one part at a time,
coordinate-wise or block-wise, so that it fits an all-reduce in which every reducer sees a part of
all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low

import torch

from rayhive.spec import Aggregation

#: Takes weights and parts of equal shape, at least one of each; returns the aggregate.
Rule = Callable[[Sequence[float], Sequence[torch.Tensor]], torch.Tensor]

#: Share of the values that the trimmed mean omits at each end; at least one of three or more.
TRIMMED = 0.2
#: Number of steps of centred clipping.
CLIPPING_STEPS = 5
#: Smallest weight relative to the largest one; parts of smaller weight are ignored by rules.
NEGLIGIBLE = 1e-6


def weighted_mean(weights: Sequence[float], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weighted mean of parts."""
    total = torch.zeros_like(parts[0])
    for weight, part in zip(weights, parts, strict=True):
        total.add_(part, alpha=weight)
    return total.div_(sum(weights))


def trimmed_mean(weights: Sequence[float], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the coordinate-wise trimmed mean (Yin et al., arXiv 1803.01498).

    In each coordinate the :data:`TRIMMED` share of the values at either end is omitted, and the
    weighted mean of the rest is taken. For fewer than three parts the result is the mean.
    """
    weights, parts = _not_negligible(weights, parts)
    if len(parts) < 3:
        return weighted_mean(weights, parts)
    left_out = max(1, int(TRIMMED * len(parts)))
    values, order = torch.stack(list(parts)).sort(dim=0)
    kept = slice(left_out, len(parts) - left_out)
    shares = torch.tensor(weights, dtype=values.dtype)[order[kept]]
    return (values[kept] * shares).sum(0) / shares.sum(0)


def centered_clipping(weights: Sequence[float], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the centred clipping of parts (Karimireddy et al., arXiv 2012.10333).

    ``v ← v + Σ wᵢ (xᵢ − v) min(1, τ / ‖xᵢ − v‖) / Σ wᵢ``, :data:`CLIPPING_STEPS` times. It is
    applied block-wise by each reducer to its own parts, as in Gorbunov et al. (arXiv 2106.11257).
    A reducer keeps nothing between rounds: v starts at the coordinate-wise median, and the radius
    τ is the median distance to it. For fewer than three parts the result is the mean.
    """
    weights, parts = _not_negligible(weights, parts)
    if len(parts) < 3:
        return weighted_mean(weights, parts)
    stacked = torch.stack(list(parts))
    values = stacked.sort(dim=0).values
    middle = len(parts) // 2
    center = (values[middle] + values[-middle - 1]) / 2
    radius = median_low(torch.linalg.vector_norm((stacked - center).flatten(1), dim=1).tolist())
    shares = torch.tensor(weights, dtype=center.dtype) / sum(weights)
    for _ in range(CLIPPING_STEPS):
        differences = (stacked - center).flatten(1)
        distances = torch.linalg.vector_norm(differences, dim=1)
        scales = shares * (radius / distances.clamp_min(1e-30)).clamp_max(1.0)
        center = center + (scales @ differences).view_as(center)
    return center


def _not_negligible(
    weights: Sequence[float], parts: Sequence[torch.Tensor]
) -> tuple[list[float], list[torch.Tensor]]:
    """Return the weights and parts without those of negligible weight."""
    least = NEGLIGIBLE * max(weights)
    pairs = [(w, part) for w, part in zip(weights, parts, strict=True) if w > least]
    return [weight for weight, _ in pairs], [part for _, part in pairs]


RULES: dict[Aggregation, Rule | None] = {
    "mean": None,
    "centered_clipping": centered_clipping,
    "trimmed_mean": trimmed_mean,
}
