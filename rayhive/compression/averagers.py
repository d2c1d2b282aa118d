"""The averagers of a peer: hivemind's three kinds, measured.

Each talks under the name of its hivemind class, so that plain hivemind peers can join.
"""

from __future__ import annotations

from typing import Any

from hivemind.optim.grad_averager import GradientAverager
from hivemind.optim.state_averager import TrainingStateAverager

from rayhive.compression.averager import MeasuredAverager
from rayhive.compression.powersgd import TransactionalPowerSGD
from rayhive.compression.steps import RecordedSteps


class RayhiveGradientAverager(MeasuredAverager, GradientAverager, RecordedSteps):
    """Averages gradients as they are, or through a codec."""

    wire_name = "GradientAverager"


class RayhivePowerSGDAverager(MeasuredAverager, TransactionalPowerSGD, RecordedSteps):
    """Averages low-rank factors of gradients."""

    wire_name = "PowerSGDGradientAverager"


class RayhiveStateAverager(MeasuredAverager, TrainingStateAverager, RecordedSteps):
    """Averages parameters, optimizer statistics and extra tensors."""

    wire_name = "TrainingStateAverager"

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Do what hivemind's does; nothing, where hivemind looks for results that cannot be."""
        if not args and kwargs == {"apply_delayed_updates": True}:
            finished = (self.finished_averaging_round, self.finished_optimizer_step)
            if not self.pending_updates and not any(event.is_set() for event in finished):
                return None
        return super().step(*args, **kwargs)
