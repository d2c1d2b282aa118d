"""Training of a baseline in a peer process: the same events, commands and clock as a swarm's."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rayhive import events
from rayhive.baselines.base import Baseline, Member
from rayhive.compression.payload import payload
from rayhive.errors import PeerError
from rayhive.peer.arithmetic import arithmetic
from rayhive.peer.callback import batch_loss
from rayhive.peer.channel import Channel
from rayhive.peer.from_spec import PeerFit
from rayhive.peer.measurements import BatchReports, SampleCounts, TrainingClock, WeightsSketch
from rayhive.peer.process import prepare_one_at_a_time
from rayhive.registry import BASELINES
from rayhive.spec.commands import Shutdown, Start, Train
from rayhive.spec.replicate import PeerSpec

#: Interval at which a peer that does not train looks for commands [s].
POLL_S = 0.05


def train_baseline(channel: Channel, spec: PeerSpec, facts: dict[str, Any]) -> None:
    """Train as one peer of a baseline until the replicate is over.

    Args:
        channel: Destination of events and source of commands.
        spec: The peer.
        facts: Further fields of ``peer_ready``: versions.
    """
    assert spec.baseline is not None
    baseline: Baseline = BASELINES.get(spec.baseline)()
    if baseline.restarts:
        from rayhive.peer.elastic import run_agent

        run_agent(channel, spec, facts)
        return
    fit = PeerFit(spec, baseline.share(spec))
    prepare_one_at_a_time(fit.module)
    member = baseline.member(spec, fit.batch_size)
    member.stopping = lambda: channel.stop_reason is not None
    start = channel.wait_for(Start)
    if not baseline.trains(spec):
        channel.emit(events.DHTReady(addresses=[f"tcp://{spec.host}:0"]))
        _hold_the_node(channel, ready_event(fit, member, fit.module, facts, trains=False))
        return
    channel.emit(events.DHTReady(addresses=member.listen(start.initial_peers)))
    member.connect()
    trainer = fit.make_trainer(
        member.strategy(),
        BaselineTraining(spec, fit, member, channel, facts),
        accumulate_grad_batches=member.batches_per_round,
    )
    fit.run(trainer)


def ready_event(
    fit: PeerFit,
    member: Member,
    module: LightningModule,
    facts: dict[str, Any],
    trains: bool = True,
) -> events.PeerReady:
    """Return the event of a peer that waits for the start of training."""
    shapes = [list(parameter.shape) for parameter in trained(module)]
    dense = payload([tuple(shape) for shape in shapes]).dense_bytes
    target = fit.workload.target
    return events.PeerReady(
        shapes=shapes,
        dense_payload_bytes=dense,
        payload_exact=False,
        batch_size=fit.batch_size,
        target=None if target is None else asdict(target),
        data=fit.workload.data,
        device=str(module.device),
        arithmetic=arithmetic(module.device),
        trains=trains,
        **member.payload_fields(dense),
        **facts,
    )


def trained(module: LightningModule) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _hold_the_node(channel: Channel, ready: events.PeerReady) -> None:
    """Stay until the replicate is over, without training."""
    channel.emit(ready)
    channel.wait_for(Train)
    channel.emit(events.TrainingStarted(round=0))
    while channel.stop_reason is None:
        if channel.notice is not None:
            channel.say_goodbye(events.Left(round=0, handed_over=0, lost=0))
            return
        time.sleep(POLL_S)
    channel.emit(events.PeerFinished(reason=channel.stop_reason, round=0, samples=0, pending=0))
    channel.wait_for(Shutdown)


class BaselineTraining(Callback):
    """Makes a Lightning training one peer's part of a replicate.

    Args:
        spec: The peer.
        fit: Its workload and data.
        member: Its part of the baseline.
        channel: Destination of its events and source of its commands.
        facts: Further fields of ``peer_ready``.
    """

    def __init__(
        self,
        spec: PeerSpec,
        fit: PeerFit,
        member: Member,
        channel: Channel,
        facts: dict[str, Any],
    ) -> None:
        self._spec, self._fit, self._member = spec, fit, member
        self._channel, self._facts = channel, facts
        self._clock, self._samples = TrainingClock(), SampleCounts()
        self._reason: str | None = None
        self._round = 0
        self._evaluated: int | None = None
        self._round_ended_s = 0.0
        self._batches = BatchReports(channel.emit, self._samples)
        self._sketch: WeightsSketch | None = None
        self._rounds = spec.budget.rounds(member.round_size)
        self._evaluate_every = spec.evaluation.rounds(member.round_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report ready, and wait for the start of training."""
        own = self._member.schedules_rounds
        for config in () if own else trainer.lr_scheduler_configs:  # one step of it is one round
            if not isinstance(config.scheduler, ReduceLROnPlateau):
                config.interval, config.frequency = "step", 1
        self._sketch = WeightsSketch(list(trained(pl_module)))
        self._begin(pl_module)
        self._member.training_began()

    def _begin(self, module: LightningModule) -> None:
        """Report ready, and wait for the start of training."""
        self._channel.emit(ready_event(self._fit, self._member, module, self._facts))
        self._channel.wait_for(Train)
        self._channel.emit(events.TrainingStarted(round=self._round))
        self._clock.start()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the samples of a batch."""
        self._member.backward_ended()
        self._samples.computed += self._fit.batch_size

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the loss; after a round, report it, evaluate if it is time, and agree on the end."""
        loss = batch_loss(trainer, outputs)
        self._batches.end_batch(loss)
        before, self._round = self._round, self._member.rounds(trainer)
        loaded = self._member.loaded_state()
        if loaded is not None:
            event = events.StateLoaded(**loaded, lost=self._samples.drop())
            self._channel.emit(event)
            before = event.round
        if not self._member.in_step and self._round == before:
            self._stop(trainer, self._asked())
        if self._round == before:
            return
        self._report_round()
        wanted = self._after_round(pl_module, before, loss)
        self._keep(trainer)
        agreed = self._member.agree(wanted or self._channel.stop_reason)
        if self._rounds is not None and self._round >= self._rounds:
            agreed = "diverged" if "diverged" in (wanted, agreed) else "rounds"
        if self._channel.notice is not None:
            agreed = "notice"
        self._member.training_began()  # measurements are no part of the next round
        self._stop(trainer, agreed)

    def _keep(self, trainer: Trainer) -> None:
        """Write what outlives this process; by default, nothing does."""

    def _asked(self) -> str | None:
        """Return the reason of a command or the budget to stop between two rounds."""
        if self._channel.notice is not None:
            return "notice"
        over = self._clock.seconds() >= self._spec.budget.seconds_per_replicate
        return self._channel.stop_reason or ("seconds" if over else None)

    def _stop(self, trainer: Trainer, reason: str | None) -> None:
        if reason is not None:
            self._reason, trainer.should_stop = reason, True

    def _report_round(self) -> None:
        now, computed = self._clock.seconds(), self._samples.computed
        fields = self._member.round_fields()
        entered = 0 if fields["outcome"] == "skipped" else self._samples.pending
        self._channel.emit(
            events.Round(
                round=self._round,
                samples=entered,
                computed=computed,
                lost=self._samples.enter(entered, computed),
                clock_s=now,
                loss=self._batches.mean_loss(),
                **fields,
            )
        )
        seconds, self._round_ended_s = now - self._round_ended_s, now
        self._channel.emit(
            events.Transition(round=self._round, seconds=seconds, clock_s=now, computed=computed)
        )

    def _after_round(self, module: LightningModule, before: int, loss: float | None) -> str | None:
        """Report the weights, evaluate if it is time, and return a reason to stop."""
        assert self._sketch is not None
        reason = "diverged" if loss is not None and not math.isfinite(loss) else None
        with self._clock.paused():
            weights = self._sketch(self._round, trained(module))
            self._channel.emit(weights)
            if not weights.finite:
                reason = "diverged"
            elif self._round // self._evaluate_every > before // self._evaluate_every:
                reason = self._evaluate(module) or reason
        if reason is None and self._clock.seconds() >= self._spec.budget.seconds_per_replicate:
            reason = "seconds"
        return reason

    def _evaluate(self, module: LightningModule, final: bool = False) -> str | None:
        """Evaluate, wait for the others unless it is the end, and return a reason to stop."""
        self._evaluated = self._round
        clock_s = self._clock.seconds()
        values = self._fit.workload.evaluate(module, module.device)
        self._channel.emit(
            events.Evaluation(
                round=self._round,
                samples=self._samples.computed,
                clock_s=clock_s,
                values=values,
                final=final,
            )
        )
        if not final:
            self._member.meet()
        target = self._fit.workload.target
        if not math.isfinite(values["loss"]):
            return "diverged"
        if target is None or not self._spec.budget.stop_at_target:
            return None
        return "target" if target.reached(values[target.metric]) else None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate a last time, report the end, and stay until all members may leave."""
        clock_s, reason = self._clock.seconds(), self._reason or "stop"
        if reason == "notice":
            self._say_goodbye(clock_s)
            return
        if reason != "diverged" and self._evaluated != self._round:
            found = self._evaluate(pl_module, final=True)
            reason = "diverged" if found == "diverged" else reason
        self._channel.emit(
            events.PeerFinished(
                reason=reason,
                round=self._round,
                samples=self._samples.computed,
                pending=self._samples.pending,
                clock_s=clock_s,
            )
        )
        self._channel.wait_for(Shutdown)
        self._member.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Report an error before anything is cleared up.

        A peer that was given notice says goodbye instead: the member that it misses may have left
        for the same reason.
        """
        if self._channel.notice is not None:
            if not self._channel.has_left:
                self._say_goodbye(self._clock.seconds())
            return
        if self._member.lost_others(exception):
            told = PeerError(f"{self._spec.baseline} cannot go on: another member is gone")
            told.__cause__ = exception
            exception = told
        self._channel.fail(exception)

    def _say_goodbye(self, clock_s: float) -> None:
        computed, lost = self._samples.computed, self._samples.drop()
        left = events.Left(round=self._round, handed_over=0, lost=lost)
        self._channel.say_goodbye(left, computed, clock_s)
