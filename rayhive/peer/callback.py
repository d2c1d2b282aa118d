"""What a measured peer does besides training: wait at the barrier, evaluate, report, stop."""

from __future__ import annotations

import math
import time
import traceback
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from rayhive.compression.payload import ELEMENT_BYTES
from rayhive.optim.watchdog import PeerProcessDied
from rayhive.peer.channel import Channel
from rayhive.peer.checkpoints import save_checkpoint
from rayhive.peer.fault_injection import FaultInjection
from rayhive.peer.from_spec import payload_fields
from rayhive.peer.preemption import Preemption, Samples
from rayhive.peer.process import leave
from rayhive.peer.training_clock import TrainingClock
from rayhive.peer.weights_sketch import WeightsSketch
from rayhive.spec.replicate import PeerSpec
from rayhive.strategy.clock_skew import SkewedClock
from rayhive.workloads.base import Workload

#: Longest wait at the start for the peers that the supervisor says are ready [s].
ANNOUNCE_TIMEOUT = 30.0
#: Shortest time between two words on what was computed [s]: of a peer that is killed there is no
#: other.
PROGRESS_S = 0.5


class MeasuredTraining(Callback):
    """Turns a plain ``Trainer.fit`` into one peer's part of a replicate.

    Args:
        spec: The peer.
        workload: What it trains.
        channel: Where its events go and its commands come from.
        facts: Fields that ``peer_ready`` carries besides (versions, hardware).
        skew: The peer's clock, if it may be put wrong.
    """

    def __init__(
        self,
        spec: PeerSpec,
        workload: Workload,
        channel: Channel,
        facts: dict[str, Any],
        skew: SkewedClock | None = None,
    ) -> None:
        self.spec, self.workload, self.channel, self.facts = spec, workload, channel, facts
        self.clock = TrainingClock()
        self.sabotage = FaultInjection(spec.faults, channel.emit, self.clock.seconds, skew)
        self.samples = Samples()
        self.leaving = Preemption(channel)
        self.reason: str | None = None
        self._round = 0
        self._round_ended = self._told = 0.0
        self._losses: list[float] = []
        #: Samples computed when a round was left behind whose averaging is not over.
        self._computed: dict[int, int] = {}
        self._sketch: WeightsSketch | None = None
        #: What it steps with by itself from now on, nobody will have.
        self._handing_over = False

    # -- events of the optimizer, from its threads ---------------------------------------------

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        """Forward an event of the optimizer, with clock and samples where they belong."""
        now = self.clock.seconds()
        if kind == "round":
            # with delayed gradients it comes late, when the next samples are computed already
            computed = self._computed.pop(fields["round"], self.samples.computed)
            outcome = fields["outcome"]
            in_vain = outcome == "skipped" or (outcome == "local" and self._handing_over)
            entered = 0 if in_vain else fields["samples"]
            lost = self.samples.enter(entered, computed)
            fields = {
                **fields, "samples": entered, "computed": computed, "lost": lost,
                "clock_s": now, "loss": self._mean_loss(),
            }  # fmt: skip
        elif kind == "transition":
            if self._delays_gradients:
                self._computed = {fields["round"]: self.samples.computed}
            seconds, self._round_ended = now - self._round_ended, now
            computed = self.samples.computed
            fields = {**fields, "clock_s": now, "computed": computed, "seconds": seconds}
        elif kind == "state_loaded":
            fields = {**fields, "lost": self.samples.drop(fields["kept"])}
        self.leaving.on_event(kind, fields)
        self.channel.emit(kind, **fields)

    @property
    def _delays_gradients(self) -> bool:
        return self.spec.configuration.delay == "gradients"

    def _mean_loss(self) -> float | None:
        losses, self._losses = self._losses, []
        return sum(losses) / len(losses) if losses else None

    # -- Lightning's hooks ---------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report ready, and wait until everybody is."""
        trainer.strategy.catch_up()  # type: ignore[attr-defined]
        optimizer = self._optimizer(trainer)
        self.sabotage.attach(optimizer)
        parameters = list(optimizer.state_averager.main_parameters)
        self._sketch = WeightsSketch(parameters)
        target = self.workload.target
        self.channel.emit(
            "peer_ready",
            **payload_fields(self.spec, parameters),
            dense_state_bytes=ELEMENT_BYTES * optimizer.state_averager.total_size,
            batch_size=self.spec.swarm.batch_size or self.workload.default_batch_size,
            target={"metric": target.metric, "value": target.value, "mode": target.mode},
            data=self.workload.data,
            device=str(pl_module.device),
            processes=optimizer.processes,
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
        self.leaving.take_signals()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note when a batch begins."""
        self.leaving.begin_batch()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the samples of a batch before they can enter a round."""
        self.samples.computed += self.spec.swarm.batch_size or self.workload.default_batch_size

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
        now = time.monotonic()
        if now - self._told >= PROGRESS_S:
            self._told = now
            self.channel.emit("progress", computed=self.samples.computed)
        round_ = self._optimizer(trainer).local_epoch
        if round_ != self._round:
            crossed = self._crossed_evaluation(self._round, round_)
            self._round = round_
            self._after_round(trainer, pl_module, crossed)
        if self.channel.checkpoint_asked:
            self.channel.checkpoint_asked = False
            self.channel.emit("checkpoint", round=self._round, **save_checkpoint(trainer))
        if self.channel.stop_reason is not None:
            self._stop(trainer, self.channel.stop_reason)
        elif self.leaving.is_due(self._pending(trainer), lambda: self._hand_over(trainer)):
            self._stop(trainer, "notice")
        elif self.clock.seconds() >= self.spec.budget.seconds_per_replicate:
            self._stop(trainer, "seconds")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let background rounds finish, evaluate a last time, and leave only with the others."""
        optimizer = self._optimizer(trainer)
        optimizer.state_averager.step(wait_for_delayed_updates=True)
        optimizer.tracker.take_part(False)  # whoever goes on does not wait for this peer
        clock_s = self.clock.seconds()
        if self.reason == "notice":
            self._say_goodbye(optimizer.local_epoch)
            return
        if self.reason != "diverged":
            self._evaluate(trainer, pl_module, final=True)
        self.channel.emit(
            "peer_finished",
            reason=self.reason or "stop",
            round=optimizer.local_epoch,
            samples=self.samples.computed,
            pending=self.samples.pending,
            clock_s=clock_s,
        )
        self.channel.wait_for("shutdown")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Tell it before anything is cleared up.

        A peer that has lost a process ends at once: what is left of it waits for what is gone. One
        that was to end says goodbye, if what was to end it was faster.
        """
        if self.channel.notice is None:
            self.channel.fail(exception)
            if isinstance(exception, PeerProcessDied):
                traceback.print_exception(type(exception), exception, exception.__traceback__)
                leave(1)
        elif not self.channel.has_left:
            self._say_goodbye(self._round)
            if isinstance(exception, PeerProcessDied):
                leave(0)

    def _say_goodbye(self, round_: int) -> None:
        self.channel.say_goodbye(
            round_=round_,
            samples=self.samples.computed,
            clock_s=self.clock.seconds(),
            handed_over=self.leaving.handed_over,
            lost=self.samples.drop(),
        )

    # -- parts ---------------------------------------------------------------------------------

    @staticmethod
    def _optimizer(trainer: Trainer) -> Any:
        return trainer.strategy.optimizer  # type: ignore[attr-defined]

    @staticmethod
    def _pending(trainer: Trainer) -> int:
        averager = MeasuredTraining._optimizer(trainer).grad_averager
        return 0 if averager is None else int(averager.local_samples_accumulated)

    def _hand_over(self, trainer: Trainer) -> None:
        self._handing_over = True
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        MeasuredTraining._optimizer(trainer).hand_over(scaler)

    def _crossed_evaluation(self, before: int, after: int) -> bool:
        every = self.spec.evaluate_every_rounds
        return after // every > before // every

    def _after_round(
        self, trainer: Trainer, pl_module: LightningModule, evaluation_due: bool
    ) -> None:
        optimizer = self._optimizer(trainer)
        optimizer.begin_batch()  # measuring is no break: the others should find it as it was
        with self.clock.paused():
            self._fingerprint(trainer)
            if evaluation_due:
                self._evaluate(trainer, pl_module)
        optimizer.end_batch()
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
            samples=self.samples.computed,
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
