"""Gradients that pile up for a round, without a pass over memory that nobody needs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hivemind.optim.grad_averager import GradientAverager


class Accumulation(GradientAverager):
    """Mixin for averagers of gradients: the first batch of a round is copied.

    hivemind fills its accumulators with zeros after a round and adds every batch. Here they are
    cleared by a mark; whoever reads them before a batch has come finds zeros all the same.
    """

    #: Whether the accumulators stand for zeros, whatever they hold.
    _cleared = False
    _anchor_batch_size: int | None

    @torch.no_grad()
    def _grad_accumulators(self) -> Iterator[torch.Tensor]:
        if self._cleared:
            self._cleared = False
            for accumulator in self._local_accumulators:
                accumulator.zero_()
        yield from super()._grad_accumulators()

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        """Add the gradients of the parameters to what was accumulated for the round.

        Args:
            batch_size: Samples that they were computed of.
        """
        if not self._cleared:
            super().accumulate_grads_(batch_size)
            return
        self._cleared = False
        gradients = self._grads_from_parameters()
        for accumulator, gradient in zip(self._local_accumulators, gradients, strict=True):
            accumulator.copy_(gradient)
        # gradients of later batches count by their samples over those of the first one
        self._anchor_batch_size = self.local_samples_accumulated = batch_size
        self.local_times_accumulated = 1

    def reset_accumulated_grads_(self) -> None:
        """Forget what was accumulated."""
        if self.reuse_grad_buffers:  # autograd adds to these
            super().reset_accumulated_grads_()
            return
        self._cleared, self._accumulators_used_in_step = True, False
        self.local_samples_accumulated = self.local_times_accumulated = 0
        self._anchor_batch_size = None
