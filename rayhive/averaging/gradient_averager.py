"""Averager of gradients, whose contribution to a round is the mean over samples.

The gradient of a batch is the mean over its samples, so batches count by their number of samples.
Accumulators hold the sum of all gradients, each weighted by its samples over those of the *anchor*:
the first batch of the round, or the last one where autograd itself adds to the buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from hivemind.optim.grad_averager import GradientAverager

from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.outlier_filter import OutlierFilter
from rayhive.spec import OutlierFilterRule


def mean_scale(averager: GradientAverager) -> float:
    """Return the factor from accumulated gradients to their mean over samples.

    hivemind divides by the number of batches instead, which differs if their sizes do.
    """
    samples = averager.local_samples_accumulated
    return float(averager._anchor_batch_size or 0) / samples if samples else 0.0


class RayhiveGradientAverager(GradientAverager, MeasuredAverager):
    """Averager of gradients as they are, or through a codec.

    hivemind fills its accumulators with zeros after a round and adds every batch. Here they are
    marked as cleared, and the first batch of a round is copied. Read before the first batch, they
    are zeros all the same.

    Args:
        args: As hivemind's.
        outlier_filter: Rule of the outlier filter, equal for all peers of a swarm; see
            :func:`rayhive.averaging.outlier_filter.judge`.
        kwargs: As those of hivemind's and of :class:`MeasuredAverager`.
    """

    wire_name = "GradientAverager"
    #: Whether the accumulators stand for zeros, whatever they hold.
    _cleared = False
    local_samples_accumulated: int
    _anchor_batch_size: int | None

    def __init__(
        self, *args: Any, outlier_filter: OutlierFilterRule = "norm", **kwargs: Any
    ) -> None:
        super().__init__(*args, outlier_filter=OutlierFilter(outlier_filter), **kwargs)

    @torch.no_grad()
    def _grad_accumulators(self) -> Iterator[torch.Tensor]:
        if self._cleared:
            self._cleared = False
            for accumulator in self._local_accumulators:
                accumulator.zero_()
        yield from super()._grad_accumulators()

    @torch.no_grad()
    def expect_batch(self, batch_size: int) -> None:
        """Prepare for a batch's gradients, before its backward pass.

        With ``reuse_grad_buffers`` autograd adds every batch with the same weight. The sum of the
        earlier batches is therefore rescaled to the new batch as the anchor. Batches of equal size
        cost nothing.

        Args:
            batch_size: Samples of the batch.
        """
        if not self.reuse_grad_buffers or batch_size < 1:
            return
        if self.local_samples_accumulated and self._anchor_batch_size not in (None, batch_size):
            factor = float(self._anchor_batch_size or 0) / batch_size
            torch._foreach_mul_(list(self._grad_accumulators()), factor)
        self._anchor_batch_size = batch_size

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int) -> None:
        """Add the gradients of the parameters to the accumulators.

        Args:
            batch_size: Samples of the batch. A batch without samples has no mean and is ignored.

        Raises:
            ValueError: Buffers are reused, and :meth:`expect_batch` was called with another size.
        """
        if batch_size < 1:
            return
        if self.reuse_grad_buffers:
            if not self.local_samples_accumulated:
                self._anchor_batch_size = batch_size
            elif self._anchor_batch_size != batch_size:
                raise ValueError(
                    f"with reuse_grad_buffers, a batch of {batch_size} after batches of "
                    f"{self._anchor_batch_size} gets a wrong weight: call "
                    f"expect_batch({batch_size}) of the averager before its backward pass"
                )
        if not self._cleared:
            super().accumulate_grads_(batch_size)
            return
        self._cleared = False
        gradients = self._grads_from_parameters()
        for accumulator, gradient in zip(self._local_accumulators, gradients, strict=True):
            accumulator.copy_(gradient)
        self._anchor_batch_size = self.local_samples_accumulated = batch_size
        self.local_times_accumulated = 1

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        """Set the averaged tensors to the mean over samples of the accumulated gradients."""
        scale = mean_scale(self)
        with self.get_tensors() as averaged:
            for gradient, accumulated in zip(averaged, self._grad_accumulators(), strict=True):
                gradient.copy_(accumulated).mul_(scale)

    def reset_accumulated_grads_(self) -> None:
        """Clear the accumulators."""
        if self.reuse_grad_buffers:  # autograd adds to these
            super().reset_accumulated_grads_()
            return
        self._cleared, self._accumulators_used_in_step = True, False
        self.local_samples_accumulated = self.local_times_accumulated = 0
        self._anchor_batch_size = None
