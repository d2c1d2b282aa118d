"""hivemind's averaging of one peer's parts, such that a sender that dies takes nobody with it."""

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
    """Averages the parts of which this peer is the reducer.

    In hivemind all senders of a part wait for one future. A sender that hangs up while it waits
    cancels it for everybody, this peer's own parts included, and the all-reduce stands still until
    its timeout. And a part that was counted, but waits for its turn when its sender is given up, is
    expected and never added. Here what was counted is added, whatever becomes of its sender.

    A part that is not finite is refused, and so is all that follows from its sender: hivemind
    would make everybody's average of it.

    Attributes:
        excluded: Senders whose parts are answered, but count for nothing.
        refused: Senders that sent parts which are not finite.
        rule: What is made of the parts in place of their mean; None for the mean, for which parts
            are added up as they come and not kept.
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
            BannedException: The sender was given up before it sent this part, or sends what is
                not finite.
            AllreduceException: The all-reduce ended meanwhile.
        """
        if sender_index in self.excluded:
            weight = 0.0
        elif not math.isfinite(float(tensor_part.sum(dtype=torch.float32))):
            self.refused |= {sender_index}
            raise BannedException(f"sender {sender_index} sent what is not finite")
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
        """Aggregate what is there once nothing more is expected; without weights that is 0."""
        complete = self.current_part_accumulated_from == self.num_current_senders
        if complete and self.rule is not None and self._parts:
            weights, parts = zip(*self._parts, strict=True)
            self.accumulator, self.denominator = self.rule(weights, parts), 1.0
            self._parts = ()
        if complete and self.denominator == 0.0:
            self.denominator = 1.0
        super().check_current_part_finished()


def _note_exception(task: asyncio.Task[Any]) -> None:
    """Read a task's exception, for there may be nobody left to do so."""
    if not task.cancelled():
        task.exception()
