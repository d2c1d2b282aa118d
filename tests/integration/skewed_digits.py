"""The digits workload with different classes on each peer: honest peers with unequal data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule

from rayhive.workloads.data import Batch, Gather, evaluation
from rayhive.workloads.digits import Digits

#: The classes that only the last peers have.
RARE = 5


class SkewedDigits(Digits):
    """Digits with label skew: the first peers hold 0-4, the others 5-9.

    Args:
        common: How many peers hold 0-4.
        **args: As for ``digits``.
    """

    name: ClassVar[str] = "skewed_digits"

    def __init__(self, common: int = 2, **args: Any) -> None:
        super().__init__(**args)
        self.common = common

    def gather(self, peer: int, seed: int) -> Gather:
        """Return the sampler of the peer's own classes."""
        images, labels = self.splits[0]
        own = torch.nonzero((labels >= RARE) == (peer >= self.common)).squeeze(1)
        images, labels = images[own], labels[own]

        def batch(index: Sequence[int]) -> Batch:
            at = torch.as_tensor(index) % len(own)
            return images[at], labels[at]

        return batch

    def evaluate(
        self, module: LightningModule, device: torch.device | str | None = None
    ) -> dict[str, float]:
        """Return the metrics of ``digits``, and the accuracy on the classes 5-9 as ``rare``."""
        images, labels = self.splits[1]
        rare = labels >= RARE
        with evaluation(module):
            hits = module(images[rare]).argmax(1) == labels[rare]
        return {**super().evaluate(module, device), "rare": hits.float().mean().item()}
