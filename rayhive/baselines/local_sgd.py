"""Baseline ``local-sgd``: members step on their own, and torch averages their parameters."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
from torch.distributed.algorithms.model_averaging.utils import average_parameters

from rayhive.baselines.ddp import Ddp, Hook, MeasuredDDP, Rank
from rayhive.spec.replicate import PeerSpec


class ParameterAveraging(MeasuredDDP):
    """DDP whose members average their parameters after some optimizer steps.

    torch's ``PeriodicModelAverager`` averages after steps 1, 1 + period, 1 + 2 period and so on;
    here each round ends with its average.

    Args:
        args: Arguments of :class:`MeasuredDDP`.
        period: Optimizer steps in a round.
        kwargs: Further arguments of :class:`MeasuredDDP`.
    """

    def __init__(self, *args: Any, period: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._period, self._steps = period, 0

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step, and average the parameters at the end of a round."""
        output = super().optimizer_step(*args, **kwargs)
        self._steps += 1
        if self._steps % self._period == 0:
            assert self.model is not None and dist.group.WORLD is not None
            self._traffic.bucket_ready()
            trained = (each for each in self.model.parameters() if each.requires_grad)
            average_parameters(trained, dist.group.WORLD)
            self._traffic.backward_ended()
        return output

    def _noted(self, state: Any, bucket: GradBucket) -> Any:
        return self._hook(state, bucket)  # gradients stay here


class LocalRank(Rank):
    """One process; it steps after each of its batches."""

    strategy_type: ClassVar[type[MeasuredDDP]] = ParameterAveraging

    def __init__(self, spec: PeerSpec, batch_size: int) -> None:
        super().__init__(spec, batch_size)
        self._steps, self.batches_per_round = self.batches_per_round, 1

    def hook(self) -> tuple[Hook, Any]:
        """Return torch's hook, and a state that begins with local steps and shares no gradients."""
        state = post_localSGD_hook.PostLocalSGDState(  # type: ignore[no-untyped-call]
            None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False
        )
        return post_localSGD_hook.post_localSGD_hook, state

    def arguments(self) -> dict[str, Any]:
        """Return the number of steps in a round."""
        return {"period": self._steps}

    def rounds(self, trainer: Trainer) -> int:
        """Return the number of averages so far."""
        return trainer.global_step // self._steps

    def backward_ended(self) -> None:
        """Do nothing: no backward pass exchanges anything."""


class LocalSGD(Ddp):
    """Local SGD (Stich, 2018, "Local SGD converges fast and communicates little") by torch's means.

    Members step after each of their batches. A round has ``local_sgd.local_steps`` batches of the
    swarm, as with the axis ``local_steps``, and ends with torch's ``average_parameters``, in 32
    bits. Every member makes the same number of steps in a round, and keeps the statistics of its
    optimizer.
    """

    about = "torch's local SGD: local optimizer steps, and an average of the parameters each round."
    member = LocalRank
