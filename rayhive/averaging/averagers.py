"""The averagers of a peer: hivemind's three kinds, measured.

Each talks under the name of its hivemind class, so that a single averager can average with plain
hivemind peers. The optimizer forms groups otherwise: all peers of a run use rayhive's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import torch
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.state_averager import TrainingStateAverager

from rayhive.averaging.accumulator import GradientAccumulator
from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.extra_tensors import ExtraTensors
from rayhive.averaging.filtered_averager import Filtered, FilteredFactors, FilteredState
from rayhive.averaging.inline_executor import InlineExecutor
from rayhive.averaging.powersgd_averager import TransactionalPowerSGD
from rayhive.averaging.state_download import CheckedStateDownload, with_digest
from rayhive.averaging.step_history import RecordedSteps

#: Options of a state averager's step with which it may go on in the background, or wait for peers.
MAY_LAST = ("delay_optimizer_step", "delay_averaging", "averaging_round", "wait_for_trigger")


class RayhiveGradientAverager(
    Filtered,
    MeasuredAverager,
    GradientAccumulator,
    GradientAverager,
    RecordedSteps,
    CheckedStateDownload,
):
    """Averages gradients as they are, or through a codec."""

    wire_name = "GradientAverager"


class RayhivePowerSGDAverager(  # type: ignore[misc]  # hivemind says less of what it loads
    FilteredFactors,
    MeasuredAverager,
    GradientAccumulator,
    TransactionalPowerSGD,
    RecordedSteps,
    CheckedStateDownload,
):
    """Averages low-rank factors of gradients."""

    wire_name = "PowerSGDGradientAverager"


class RayhiveStateAverager(
    FilteredState,
    MeasuredAverager,
    ExtraTensors,
    TrainingStateAverager,
    RecordedSteps,
    CheckedStateDownload,
):
    """Averages parameters, optimizer statistics and extra tensors.

    Attributes:
        on_serving: Called with the tensors of the state that a joiner asked for; what it returns
            is sent. None sends them as they are.
    """

    wire_name = "TrainingStateAverager"
    step_executor: Executor
    on_serving: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None

    #: The round that the tensors are still of while a later one has begun; else None.
    _round_left: int | None = None

    def get_current_state(self) -> tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo]]:
        """Return what a joiner gets: a copy of the state after one round, and its digest.

        hivemind hands out the tensors themselves, which go on changing while they are sent, and
        the number of a round that may only have begun.
        """
        with self.lock_optimizer:
            round_ = self.local_epoch if self._round_left is None else self._round_left
            metadata, tensors, infos = super().get_current_state()
            with self.lock_averaged_tensors:
                tensors = [tensor.clone() for tensor in tensors]
        metadata["epoch"] = round_
        shared = sum(info.role != TensorRole.OPTIMIZER for info in infos)
        metadata = with_digest(metadata, tensors[:shared])
        served = tensors if self.on_serving is None else self.on_serving(tensors)
        return metadata, served, infos

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Do what hivemind's does; nothing, where hivemind looks for results that cannot be."""
        if not args and kwargs == {"apply_delayed_updates": True}:
            finished = (self.finished_averaging_round, self.finished_optimizer_step)
            if not self.pending_updates and not any(event.is_set() for event in finished):
                return None
        if kwargs.get("increment_epoch"):
            self._round_left = self.local_epoch
        background = self.step_executor
        if not self.pending_updates and not any(map(kwargs.get, MAY_LAST)):
            self.step_executor = InlineExecutor()  # two changes of threads less
        try:
            return super().step(*args, **kwargs)
        finally:
            self.step_executor = background
            if not self.pending_updates:
                self._round_left = None

    def _update_scheduler(self) -> None:
        """Do what hivemind's does: the last thing that a round changes before averaging."""
        super()._update_scheduler()
        self._round_left = None
