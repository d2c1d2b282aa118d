"""Rounds of a peer whose tensors are excluded from the average.

Such a peer gets the whole average of the other peers, or keeps its tensors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch


class ExcludedRoundFailed(Exception):
    """An excluded peer did not get the average of a round.

    Its own tensors were refused, so it has no valid tensors for the next step.

    Args:
        reason: The error.
        rejected: The refused peers and the reason for each, as ``RoundResult.rejected``.
    """

    def __init__(self, reason: str, rejected: tuple[dict[str, Any], ...] = ()) -> None:
        super().__init__(reason, rejected)  # both, as it is pickled on its way to the trainer
        self.rejected = rejected

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.args[0]!r})"


@asynccontextmanager
async def blank_copies(tensors: Sequence[torch.Tensor]) -> AsyncIterator[list[torch.Tensor]]:
    """Yield tensors of zeros to run an all-reduce on; copy them back if it succeeds.

    An all-reduce returns the difference between the average and the tensors that were sent, and
    the difference from NaN is NaN. Zeros in the tensors themselves would outlive a round that
    fails: an offloaded optimizer steps on them.

    Args:
        tensors: The tensors that the average replaces.
    """
    blank = [torch.zeros_like(tensor) for tensor in tensors]
    yield blank
    with torch.no_grad():
        for tensor, average in zip(tensors, blank, strict=True):
            tensor.copy_(average)
