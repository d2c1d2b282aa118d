"""What a measured peer does besides training: wait at the barrier, evaluate, report, stop."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from rayhive.peer.channel import Channel
from rayhive.peer.clock import TrainingClock
from rayhive.peer.settings import payload_fields
from rayhive.peer.sketch import WeightsSketch
from rayhive.spec import PeerSpec
from rayhive.workloads.base import Workload

#: Longest wait at the start for the peers that the supervisor says are ready [s].
ANNOUNCE_TIMEOUT = 30.0


class MeasuredTraining(Callback):
    """Turns a plain ``Trainer.fit`` into one peer's part of a replicate.

    Args:
        spec: The peer.
        workload: What it trains.
        channel: Where its events go and its commands come from.
        facts: Fields that ``peer_ready`` carries besides (versions, hardware).
    """

    def __init__(
        self, spec: PeerSpec, workload: Workload, channel: Channel, facts: dict[str, Any]
    ) -> None:
        self.spec, self.workload, self.channel, self.facts = spec, workload, channel, facts
        self.clock = TrainingClock()
        self.samples = 0
        self.reason: str | None = None
        self._round = 0
        self._round_ended = 0.0
        self._losses: list[float] = []
        self._sketch: WeightsSketch | None = None

    # -- events of the optimizer, from its threads ---------------------------------------------

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        """Forward an event of the optimizer, with the training clock where it belongs."""
        if kind == "round":
            now = self.clock.seconds()
            fields = {**fields, "clock_s": now, "loss": self._mean_loss()}
        elif kind == "transition":
            now = self.clock.seconds()
            fields = {**fields, "clock_s": now, "seconds": now - self._round_ended}
            self._round_ended = now
        self.channel.emit(kind, **fields)

    def _mean_loss(self) -> float | None:
        losses, self._losses = self._losses, []
        return sum(losses) / len(losses) if losses else None

    # -- Lightning's hooks ---------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report ready, and wait until everybody is."""
        trainer.strategy.catch_up()  # type: ignore[attr-defined]
        optimizer = self._optimizer(trainer)
        parameters = list(optimizer.state_averager.main_parameters)
        self._sketch = WeightsSketch(parameters)
        target = self.workload.target
        self.channel.emit(
            "peer_ready",
            **payload_fields(self.spec, parameters),
            batch_size=self.spec.swarm.batch_size or self.workload.default_batch_size,
            target={"metric": target.metric, "value": target.value, "mode": target.mode},
            data=self.workload.data,
            device=str(pl_module.device),
            **self.facts,
        )
        self.channel.wait_for("train")
        expected = 1 if self.spec.joins else self.spec.peers
        if not optimizer.tracker.wait_for_peers(expected, ANNOUNCE_TIMEOUT):
            raise RuntimeError(
                f"saw {optimizer.tracker.live_peers} of {expected} peers "
                f"{ANNOUNCE_TIMEOUT:.0f} s after all were ready"
            )
        self._round = optimizer.local_epoch
        self.channel.emit("training_started", round=self._round)
        self.clock.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss; after a round, fingerprint the weights and evaluate if it is time."""
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if isinstance(loss, torch.Tensor):
            value = float(loss.detach())
            self._losses.append(value)
            if not math.isfinite(value):
                self._stop(trainer, "diverged")
        self.samples += self.spec.swarm.batch_size or self.workload.default_batch_size
        round_ = self._optimizer(trainer).local_epoch
        if round_ != self._round:
            crossed = self._crossed_evaluation(self._round, round_)
            self._round = round_
            self._after_round(trainer, pl_module, crossed)
        if self.channel.stop_reason is not None:
            self._stop(trainer, self.channel.stop_reason)
        elif self.clock.seconds() >= self.spec.budget.seconds_per_replicate:
            self._stop(trainer, "seconds")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let background rounds finish, evaluate a last time, and leave only with the others."""
        optimizer = self._optimizer(trainer)
        optimizer.state_averager.step(wait_for_delayed_updates=True)
        optimizer.tracker.take_part(False)  # whoever goes on does not wait for this peer
        clock_s = self.clock.seconds()
        if self.reason != "diverged":
            self._evaluate(trainer, pl_module, final=True)
        self.channel.emit(
            "peer_finished",
            reason=self.reason or "stop",
            round=optimizer.local_epoch,
            samples=self.samples,
            clock_s=clock_s,
        )
        self.channel.wait_for("shutdown")

    # -- parts ---------------------------------------------------------------------------------

    @staticmethod
    def _optimizer(trainer: Trainer) -> Any:
        return trainer.strategy.optimizer  # type: ignore[attr-defined]

    def _crossed_evaluation(self, before: int, after: int) -> bool:
        every = self.spec.evaluate_every_rounds
        return after // every > before // every

    def _after_round(
        self, trainer: Trainer, pl_module: LightningModule, evaluation_due: bool
    ) -> None:
        with self.clock.paused():
            self._fingerprint(trainer)
            if evaluation_due:
                self._evaluate(trainer, pl_module)
        if self.spec.rounds is not None and self._round >= self.spec.rounds:
            self._stop(trainer, "rounds")

    def _fingerprint(self, trainer: Trainer) -> None:
        assert self._sketch is not None
        norm, sketch, finite = self._sketch(self._optimizer(trainer).state_averager.main_parameters)
        self.channel.emit("weights", round=self._round, norm=norm, sketch=sketch, finite=finite)
        if not finite:
            self._stop(trainer, "diverged")

    def _evaluate(self, trainer: Trainer, pl_module: LightningModule, final: bool = False) -> None:
        clock_s = self.clock.seconds()
        values = self.workload.evaluate(pl_module, pl_module.device)
        self.channel.emit(
            "evaluation",
            round=self._round,
            samples=self.samples,
            clock_s=clock_s,
            values=values,
            final=final,
        )
        if not math.isfinite(values["loss"]):
            self._stop(trainer, "diverged")
        elif self.spec.budget.stop_at_target and self.workload.target.reached(
            values[self.workload.target.metric]
        ):
            self._stop(trainer, "target")

    def _stop(self, trainer: Trainer, reason: str) -> None:
        if self.reason is None or reason == "diverged":
            self.reason = reason
        trainer.should_stop = True
