"""The averagers of a peer: hivemind's three kinds, measured.

Each talks under the name of its hivemind class, so that plain hivemind peers can join.
"""

from __future__ import annotations

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
