"""Digits whose batches wait, as on an accelerator that leaves the processor free.

In `bigger_swarm.yaml` many peers share the cores of one machine. If they computed, the study would
measure how they compete for the processor, and not how the swarm copes with faults.
"""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import LightningModule
from pydantic import Field
from torch import Tensor

from rayhive.workloads.args import parse_args
from rayhive.workloads.data import Batch, seeded
from rayhive.workloads.digits import Digits, DigitsArgs, DigitsModule


class WaitingArgs(DigitsArgs):
    """Arguments of ``digits``, and the wait.

    Attributes:
        batch_s: Wait before the computation of each batch [s].
    """

    batch_s: float = Field(default=0.1, ge=0)


class WaitingModule(DigitsModule):
    """The module of ``digits``; ``training_step`` waits first."""

    args: WaitingArgs

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of one micro-batch [nats], after the wait."""
        time.sleep(self.args.batch_s)
        return super().training_step(batch, batch_idx)


class WaitingDigits(Digits):
    """The workload ``digits`` with the argument ``batch_s``."""

    name = "waiting_digits"

    def __init__(self, **args: Any) -> None:
        waiting = parse_args(WaitingArgs, args)
        super().__init__(**waiting.model_dump(exclude={"batch_s"}))
        self.args: WaitingArgs = waiting

    def module(self, seed: int) -> LightningModule:
        """Return the module; see the base class."""
        with seeded(seed):
            return WaitingModule(self.args)
