"""Averagers of gradients, dense or with PowerSGD; a peer contributes the mean over its samples.

The gradient of a batch is the mean over its samples, so batches count by their number of samples.
Accumulators hold the sum of all gradients, each weighted by its samples over those of the *anchor*:
the first batch of the round, or the last one where autograd itself adds to the buffers. They and
the averages are float32 for 16-bit parameters: a sum of many batches in 16 bit loses most of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim.grad_averager import GradientAverager

from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.error_feedback import FeedbackPayload
from rayhive.averaging.fragments import FragmentedPayload
from rayhive.averaging.gradient_extras import GradientExtras
from rayhive.averaging.page_locks import PageLocks
from rayhive.averaging.payload_policy import DensePayload
from rayhive.averaging.powersgd_payload import PowerSGDOptions, PowerSGDPayload
from rayhive.averaging.quorum import Quorum


def _dense(tensors: Any) -> DensePayload:
    return DensePayload()


def type_of_sums(tensor: torch.Tensor) -> torch.dtype:
    """Return the type for sums of values like those of a tensor: float32 for 16-bit ones."""
    return torch.promote_types(tensor.dtype, torch.float32)


def shared_zeros(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return buffers for the averages of the gradients of parameters, shared between processes.

    They are of 32 bits, as averages are, also for parameters of 64.
    """
    # with the strides of the parameters: fused optimizers read both in the order of memory
    zeros = (
        torch.zeros_like(each.detach(), dtype=torch.float32, device="cpu") for each in parameters
    )
    return [each.share_memory_() for each in zeros]  # type: ignore[no-untyped-call]


def accumulated(averager: GradientAverager) -> tuple[list[torch.Tensor], float]:
    """Return the accumulated gradients, and the factor that makes them the mean over samples.

    hivemind divides by the number of batches instead, which differs if their sizes do.

    Args:
        averager: Any averager of gradients, also one of the user's own.
    """
    samples = averager.local_samples_accumulated
    scale = float(averager._anchor_batch_size or 0) / samples if samples else 0.0
    return list(averager._grad_accumulators()), scale


class RayhiveGradientAverager(GradientAverager, MeasuredAverager):
    """Averager of gradients as they are, or through a codec.

    hivemind fills its accumulators with zeros after a round and adds every batch. Here they are
    marked as cleared, and the first batch of a round is copied. Read before the first batch, they
    are zeros all the same.

    Args:
        parameters: Parameters whose gradients are averaged.
        error_feedback: Whether the errors of a lossy codec enter the next round, see
            :mod:`rayhive.averaging.error_feedback`.
        extra_tensors: Floating-point tensors that enter every round behind the gradients, see
            :mod:`rayhive.averaging.gradient_extras`.
        fragments: Parts of the gradients of which each round averages one, see
            :mod:`rayhive.averaging.fragments`; 1 averages all in each round.
        quorum: Peers with which a round may begin; None awaits all live peers.
        pairs: Whether a round averages in random pairs, see :mod:`rayhive.averaging.pairing`.
        trainer_tensors: As of :class:`MeasuredAverager`; besides these, its process gives back the
            memory of parameters, gradients and accumulators.
        kwargs: As those of hivemind's averager and of :class:`MeasuredAverager`.

    Attributes:
        extras: The extra tensors, which enter a round with the accumulated gradients.
    """

    wire_name = "GradientAverager"
    #: Whether the accumulators stand for zeros, whatever they hold.
    _cleared = False
    #: Locks of the averaged tensors' memory, if the accumulators are on a GPU.
    _page_locks: PageLocks | None = None
    local_samples_accumulated: int
    _local_accumulators: Any
    _anchor_batch_size: int | None

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        error_feedback: bool = False,
        extra_tensors: Sequence[torch.Tensor] = (),
        fragments: int = 1,
        quorum: Quorum | None = None,
        pairs: bool = False,
        trainer_tensors: Callable[[], Iterable[torch.Tensor]] = tuple,
        **kwargs: Any,
    ) -> None:
        self._quorum, self._pairs = quorum, pairs
        if error_feedback:
            kwargs["payload"] = FeedbackPayload
        if fragments > 1:
            policy = kwargs.get("payload") or _dense
            kwargs["payload"] = partial(FragmentedPayload, fragments=fragments, policy=policy)

        def unread() -> Iterator[torch.Tensor]:
            yield from trainer_tensors()
            yield from self.parameters
            yield from (p.grad for p in self.parameters if p.grad is not None)
            yield from self._local_accumulators or ()

        parameters = tuple(parameters)
        if not kwargs.get("averaged_grads"):
            kwargs["averaged_grads"] = shared_zeros(parameters)
        self.extras = GradientExtras(extra_tensors)
        kwargs["averaged_grads"] = [*kwargs["averaged_grads"], *self.extras.shared]
        kwargs["extras"] = len(extra_tensors)
        if extra_tensors and (policy := kwargs.get("payload")) is not None:
            kwargs["payload"] = lambda tensors: policy(tensors[: len(parameters)])
        super().__init__(parameters=parameters, trainer_tensors=unread, **kwargs)
        if self._local_accumulators is not None:
            self._local_accumulators = tuple(
                each.to(type_of_sums(each)) for each in self._local_accumulators
            )

    def shutdown(self) -> None:
        """Leave the swarm and end the averager's process."""
        super().shutdown()
        if self._page_locks is not None:
            self._page_locks.close()

    def run(self) -> None:
        """Serve until shut down; executed in the averager's own process."""
        self.matchmaking_kwargs |= {"quorum": self._quorum, "pairs": self._pairs}
        super().run()

    def _grads_from_parameters(self) -> Iterator[torch.Tensor]:
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:  # averages are dense
                parameter.grad = parameter.grad.to_dense()
        yield from super()._grads_from_parameters()

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
    def set_accumulated(self, values: Iterable[torch.Tensor], samples: int, steps: int = 1) -> None:
        """Set this peer's contribution to the next round, in place of accumulated gradients.

        Args:
            values: One tensor for each parameter, to be averaged over the peers.
            samples: Number of the samples, which is the weight of this peer.
            steps: Number of an optimizer's steps that the values sum up.
        """
        self._cleared, self.summed_steps = False, max(1, steps)
        for accumulator, value in zip(self._local_accumulators, values, strict=True):
            accumulator.copy_(value)
        self._anchor_batch_size = self.local_samples_accumulated = samples
        self.local_times_accumulated = self.summed_steps

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        """Set the averaged tensors to the mean over samples of the accumulated gradients."""
        accumulators, scale = accumulated(self)
        with self.get_tensors() as tensors:
            averaged = tensors[: len(accumulators)]
            if accumulators and accumulators[0].is_cuda:
                if self._page_locks is None:  # not before the fork
                    self._page_locks = PageLocks(averaged)
                for gradient, accumulator in zip(averaged, accumulators, strict=True):
                    mean = accumulator.to(gradient.dtype) * scale
                    gradient.copy_(mean, non_blocking=True)
                torch.cuda.current_stream(accumulators[0].device).synchronize()
            else:
                for gradient, accumulator in zip(averaged, accumulators, strict=True):
                    torch.mul(accumulator.to(gradient.dtype), scale, out=gradient)
            self.extras.load()

    def take_extras(self) -> None:
        """Set the extra tensors to averages that have arrived."""
        if self.extras.arrived:
            with self.get_tensors():
                self.extras.take()

    def keep_accumulated_grads(self) -> None:
        """Let the accumulated gradients enter the next round: this one had its group already."""
        self._accumulators_used_in_step = False

    def reset_accumulated_grads_(self) -> None:
        """Clear the accumulators."""
        if self.reuse_grad_buffers:  # autograd adds to these
            super().reset_accumulated_grads_()
            return
        self._cleared, self._accumulators_used_in_step = True, False
        self.local_samples_accumulated = self.local_times_accumulated = 0
        self._anchor_batch_size = None


class RayhivePowerSGDAverager(RayhiveGradientAverager):
    """Averager of gradients through low-rank factors.

    Its arguments are those of hivemind's ``PowerSGDGradientAverager``, and the further options of
    :class:`PowerSGDOptions`.

    Args:
        parameters: Parameters whose gradients are averaged.
        averager_rank: Rank of the factors.
        prefix: As hivemind's; it also seeds Q.
        kwargs: Other options of :class:`PowerSGDOptions`, by name, and arguments of
            :class:`RayhiveGradientAverager`.

    Raises:
        ConfigError: An option is out of range, or the device does not exist.
    """

    wire_name = "PowerSGDGradientAverager"
    payload: PowerSGDPayload

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        averager_rank: int,
        *,
        prefix: str,
        **kwargs: Any,
    ) -> None:
        given = {option.name for option in fields(PowerSGDOptions)} & kwargs.keys()
        options = PowerSGDOptions(averager_rank, **{name: kwargs.pop(name) for name in given})
        parameters = tuple(parameters)
        where = options.device_for(parameters)
        policy = partial(PowerSGDPayload, options=options, seed=prefix, device=where)
        super().__init__(parameters=parameters, prefix=prefix, payload=policy, **kwargs)

    def get_current_state(self) -> tuple[Any, list[torch.Tensor], list[CompressionInfo]]:
        """Return the state that a joining peer needs to factorise like the group: every Q."""
        with self.lock_averaged_tensors:
            metadata, qs = self.payload.snapshot()
        infos = [
            CompressionInfo.from_tensor(q, key=f"buffer_q_{index}", role=TensorRole.GRADIENT)
            for index, q in enumerate(qs)
        ]
        return {"group_bits": self.get_group_bits(), **metadata}, qs, infos

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> bool:
        """Take over the Q of a peer; the error feedback of this peer stays.

        Returns:
            Whether a peer had Q that fit.
        """
        loaded = super().load_state_from_peers(wait, timeout)
        if loaded is None:
            return False
        with self.lock_averaged_tensors:
            return self.payload.restore(*loaded)
