"""Aggregation of the parts that a peer reduces: rules, and the reducer that applies them.

The mean is the default and needs no rule. The other rules bound the influence of one peer on the
result, at the price of a bias where honest peers differ. Each rule works on one part at a time,
coordinate-wise or block-wise, so that it fits an all-reduce in which every reducer sees a part of
all tensors.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from statistics import median_low

import torch
from hivemind.averaging.partition import AllreduceException, BannedException, TensorPartReducer

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


class SteadyReducer(TensorPartReducer):
    """Reducer that averages every counted part, whatever happens to its sender.

    In hivemind all senders of a part wait for one future. A sender that closes its stream while it
    waits cancels the future for all, this peer's own parts included, and the all-reduce stands
    still until its timeout. A part that was counted, but waits for its turn when its sender is
    given up, is expected and never added. Here each counted part is added.

    A part that is not finite is refused, with all later parts of its sender. hivemind would add it
    to the average of all peers.

    Attributes:
        excluded: Senders whose parts are answered and do not enter the average.
        refused: Senders of parts or weights that are not finite, or of negative weights.
        rule: Aggregation rule; None for the mean, which adds parts as they arrive and keeps none.
        weights: Sum of the weights that entered each finished average.
    """

    weights: list[float]

    denominator: float
    accumulator: torch.Tensor
    excluded: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    rule: Rule | None = None
    _parts: tuple[tuple[float, torch.Tensor], ...] = ()

    def __init__(self, part_shapes: Sequence[torch.Size], num_senders: int) -> None:
        self.weights = []
        super().__init__(part_shapes, num_senders)

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        """Add a sender's part to the sum and return the average; see hivemind.

        Raises:
            BannedException: The sender was given up before it sent this part, or the part is not
                finite, or its weight is no finite number from 0 on.
            AllreduceException: The all-reduce ended meanwhile.
        """
        if not (math.isfinite(weight) and weight >= 0.0):
            self.refused |= {sender_index}
            raise BannedException(f"sender {sender_index} sent a part with a weight of {weight}")
        if sender_index in self.excluded:
            weight = 0.0
        elif not math.isfinite(float(tensor_part.sum(dtype=torch.float32))):
            self.refused |= {sender_index}
            raise BannedException(f"sender {sender_index} sent a part that is not finite")
        self.num_parts_received[sender_index] += 1
        adding = asyncio.ensure_future(self._add(sender_index, part_index, tensor_part, weight))
        # read the exception, as the sender may be gone
        adding.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(adding)

    async def _add(
        self, sender_index: int, part_index: int, part: torch.Tensor, weight: float
    ) -> torch.Tensor:
        while part_index > self.current_part_index and not self.finished.is_set():
            await asyncio.wait({self.current_part_future})
        if self.finished.is_set():
            raise AllreduceException("the all-reduce ended before this part's turn came")
        if part_index >= self.sender_failed_after[sender_index]:
            raise BannedException(f"sender {sender_index} was given up")
        average = self.current_part_future
        if weight and self.rule is not None:
            self._parts = (*self._parts, (weight, part))
        elif weight:  # 0 times NaN is NaN
            self.accumulator.add_(part, alpha=weight)
        self.current_part_accumulated_from += 1
        self.denominator += weight
        self.check_current_part_finished()
        await asyncio.wait({average})
        result: torch.Tensor = average.result()
        return result

    def check_current_part_finished(self) -> None:
        """Aggregate the parts once all have arrived; without any weight the result is 0."""
        complete = self.current_part_accumulated_from == self.num_current_senders
        if complete:
            self.weights.append(self.denominator)
        if complete and self.rule is not None and self._parts:
            weights, parts = zip(*self._parts, strict=True)
            self.accumulator, self.denominator = self.rule(weights, parts), 1.0
            self._parts = ()
        if complete and self.denominator == 0.0:
            self.denominator = 1.0
        super().check_current_part_finished()
        if not self.num_current_senders:  # all were given up: no more parts come
            self.finalize()
