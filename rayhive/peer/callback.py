"""Lightning callback that runs one peer's training: rounds, evaluations, and the end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from rayhive.optim.local_steps import with_common_parameters
from rayhive.spec.replicate import PeerSpec
from rayhive.workloads.base import Workload


class TrainingMonitor(Protocol):
    """Observer of a peer's training, which may also end it.

    A method that returns ``str | None`` returns the reason to stop after this batch, or None.
    """

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Prepare for training, and wait until it may start."""

    def begin_batch(self) -> None:
        """Note the start of a batch."""

    def count_samples(self) -> None:
        """Count the samples of a batch, whose gradients are there and in no round yet."""

    def after_batch(self, trainer: Trainer, loss: float | None) -> str | None:
        """Note the end of a batch, with its loss if it has one."""

    def after_round(self, trainer: Trainer, round_: int) -> AbstractContextManager[str | None]:
        """Note that the peer went on to a round.

        Returns:
            A context for the evaluation that may follow. Its value is a reason to stop, or None.
        """

    def after_evaluation(
        self, round_: int, values: dict[str, float], *, clock_s: float, final: bool
    ) -> str | None:
        """Note the values of an evaluation that began at ``clock_s``."""

    def requested_stop(self, trainer: Trainer) -> str | None:
        """Return the reason of a request from outside to stop."""

    def seconds(self) -> float:
        """Return the training time that counts against the budget [s]."""

    def evaluates_at_end(self, trainer: Trainer, reason: str | None, *, evaluated: bool) -> bool:
        """Return whether to evaluate once more.

        Args:
            trainer: The trainer.
            reason: Why training has stopped; None if it was not stopped.
            evaluated: Whether the present round was evaluated already.
        """

    def end(self, trainer: Trainer, reason: str) -> None:
        """Note the end of training; it returns when the peer may leave."""

    def fail(self, round_: int, error: BaseException) -> None:
        """Note an error, before anything is cleared up."""


class PeerTraining(Callback):
    """Evaluates after rounds, and stops training when the budget of the peer is spent.

    Args:
        spec: The peer.
        workload: Its workload.
        monitor: Observer of the training.

    Attributes:
        reason: Why training stopped; None as long as it has not.
    """

    def __init__(self, spec: PeerSpec, workload: Workload, monitor: TrainingMonitor) -> None:
        self.spec, self.workload, self.monitor = spec, workload, monitor
        self.reason: str | None = None
        self._round = 0
        self._evaluated: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Download the newest state if necessary, and wait until training may start."""
        trainer.strategy.catch_up()  # type: ignore[attr-defined]
        self.monitor.start(trainer, pl_module)
        self._round = swarm_optimizer(trainer).local_epoch

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the start of a batch."""
        self.monitor.begin_batch()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the samples of a batch before they can enter a round."""
        self.monitor.count_samples()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss; after a round, evaluate if it is time; stop if there is a reason."""
        self._stop(trainer, self.monitor.after_batch(trainer, batch_loss(trainer, outputs)))
        before, self._round = self._round, swarm_optimizer(trainer).local_epoch
        if self._round != before:
            every = self.spec.evaluate_every_rounds
            with self.monitor.after_round(trainer, self._round) as reason:
                self._stop(trainer, reason)
                if self._round // every > before // every:
                    self._evaluate(trainer, pl_module)
            if self.spec.rounds is not None and self._round >= self.spec.rounds:
                self._stop(trainer, "rounds")
        self._stop(trainer, self.monitor.requested_stop(trainer))
        if self.monitor.seconds() >= self.spec.budget.seconds_per_replicate:
            self._stop(trainer, "seconds")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish background rounds, and evaluate a last time."""
        swarm_optimizer(trainer).settle()
        evaluated = self._evaluated == self._round
        if self.monitor.evaluates_at_end(trainer, self.reason, evaluated=evaluated):
            self._evaluate(trainer, pl_module, final=True)
        self.monitor.end(trainer, self.reason or "stop")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Report an error before anything is cleared up."""
        self.monitor.fail(self._round, exception)

    def _evaluate(self, trainer: Trainer, pl_module: LightningModule, final: bool = False) -> None:
        if swarm_optimizer(trainer).tracker.view.own.untrained:
            return  # its parameters are none that the run has trained
        self._evaluated = self._round
        clock_s = self.monitor.seconds()
        with with_common_parameters(swarm_optimizer(trainer)):
            values = self.workload.evaluate(pl_module, pl_module.device)
        reason = self.monitor.after_evaluation(self._round, values, clock_s=clock_s, final=final)
        self._stop(trainer, reason)

    def _stop(self, trainer: Trainer, reason: str | None) -> None:
        if reason is None:
            return
        if self.reason is None or reason == "diverged":
            self.reason = reason
        trainer.should_stop = True


def swarm_optimizer(trainer: Trainer) -> Any:
    """Return the swarm's optimizer of a trainer with a :class:`HivemindStrategy`."""
    return trainer.strategy.optimizer  # type: ignore[attr-defined]


def batch_loss(trainer: Trainer, outputs: Any) -> float | None:
    """Return the loss of a batch from the output of a training step, if there is one.

    Lightning divides it by the batches whose gradients it accumulates.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if not isinstance(loss, torch.Tensor):
        return None
    return float(loss.detach()) * trainer.accumulate_grad_batches
