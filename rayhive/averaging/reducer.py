"""Reducer of one peer's parts that tolerates the death of senders."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import torch
from hivemind.averaging.partition import (
    AllreduceException,
    BannedException,
    TensorPartReducer,
)

from rayhive.averaging.aggregation import Rule


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
        refused: Senders of parts that are not finite.
        rule: Aggregation rule; None for the mean, which adds parts as they arrive and keeps none.
    """

    denominator: float
    accumulator: torch.Tensor
    excluded: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    rule: Rule | None = None
    _parts: tuple[tuple[float, torch.Tensor], ...] = ()

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: torch.Tensor, weight: float = 1.0
    ) -> torch.Tensor:
        """Add a sender's part to the sum and return the average; see hivemind.

        Raises:
            BannedException: The sender was given up before it sent this part, or the part is not
                finite.
            AllreduceException: The all-reduce ended meanwhile.
        """
        if sender_index in self.excluded:
            weight = 0.0
        elif not math.isfinite(float(tensor_part.sum(dtype=torch.float32))):
            self.refused |= {sender_index}
            raise BannedException(f"sender {sender_index} sent a part that is not finite")
        self.num_parts_received[sender_index] += 1
        adding = asyncio.ensure_future(self._add(sender_index, part_index, tensor_part, weight))
        adding.add_done_callback(_note_exception)
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
        if complete and self.rule is not None and self._parts:
            weights, parts = zip(*self._parts, strict=True)
            self.accumulator, self.denominator = self.rule(weights, parts), 1.0
            self._parts = ()
        if complete and self.denominator == 0.0:
            self.denominator = 1.0
        super().check_current_part_finished()


def _note_exception(task: asyncio.Task[Any]) -> None:
    """Read a task's exception, as its sender may be gone."""
    if not task.cancelled():
        task.exception()
