"""Learning-rate schedule of the two tasks of the PowerSGD paper.

Source: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", arXiv:1905.13727, with the hyper-parameters that its authors published
beside their code (``hyperparameters.md`` in epfml/powersgd, Table 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from rayhive.workloads.base import SchedulerFn

WARMUP_PASSES = 5
DECAY_FACTOR = 10.0


@dataclass(frozen=True)
class PaperSchedule:
    """Factor on the learning rate of one worker, as a function of the round.

    The factor rises linearly from 1 to ``workers`` over the first five passes over the training
    split, and is divided by ten at each of ``decay_passes``.

    Attributes:
        workers: The paper's number of workers: micro-batches of the paper's size in one round.
        rounds_per_pass: Rounds in one pass over the training split.
        decay_passes: Passes at which the rate is divided, ascending.
    """

    workers: int
    rounds_per_pass: float
    decay_passes: tuple[int, ...]

    def __call__(self, rounds: int) -> float:
        """Return the factor for the round after ``rounds`` rounds."""
        passes = rounds / self.rounds_per_pass
        warm = 1.0 + (self.workers - 1.0) * min(passes / WARMUP_PASSES, 1.0)
        decays = sum(passes >= decay for decay in self.decay_passes)
        factor: float = warm / DECAY_FACTOR**decays
        return factor

    def scheduler_fn(self) -> SchedulerFn:
        """Return a factory of the scheduler of an optimizer."""
        return partial(LambdaLR, lr_lambda=self)

    def applied_to(self, optimizer: Optimizer) -> OptimizerLRScheduler:
        """Return the result of ``configure_optimizers``: the optimizer, and one step per round."""
        scheduler = LambdaLR(optimizer, self)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def rounds_per_pass(samples: int, workers: int, batch: int) -> int:
    """Return the rounds of ``workers * batch`` samples that fit in one pass, at least one."""
    return max(1, samples // (workers * batch))
