"""Monitor of a measured peer: its events, its commands and its training clock."""

from __future__ import annotations

import contextlib
import errno
import math
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from rayhive import events
from rayhive.compression.payload import ELEMENT_BYTES
from rayhive.optim.local_steps import common_parameters
from rayhive.optim.watchdog import PeerProcessDied
from rayhive.peer.arithmetic import arithmetic
from rayhive.peer.callback import swarm_optimizer
from rayhive.peer.channel import Channel
from rayhive.peer.fault_injection import FaultInjection
from rayhive.peer.from_spec import PeerFit, payload_fields
from rayhive.peer.measurements import BatchReports, SampleCounts, TrainingClock, WeightsSketch
from rayhive.peer.preemption import Preemption
from rayhive.peer.priority import yield_to_starting_peers
from rayhive.peer.process import leave
from rayhive.spec.commands import Shutdown, Train
from rayhive.spec.replicate import PeerSpec

#: Longest wait at the start for the announcements of peers that are ready [s].
ANNOUNCE_TIMEOUT = 30.0
JOIN_TIMEOUT = 10.0  # the peers of a swarm that a peer joins may all have died


class ReplicateMonitor:
    """Makes a training one peer's part of a replicate; made before the peer forks.

    Args:
        spec: The peer.
        fit: Its fit.
        channel: Destination of its events and source of its commands.
        facts: Further fields of ``peer_ready``: versions.
    """

    def __init__(
        self, spec: PeerSpec, fit: PeerFit, channel: Channel, facts: dict[str, Any]
    ) -> None:
        self.spec, self.fit, self.channel, self.facts = spec, fit, channel, facts
        self.clock = TrainingClock()
        self.samples = SampleCounts()
        self._faults = FaultInjection(spec.faults, channel.emit, self.clock.seconds)
        self._preemption = Preemption(channel)
        self._round_ended = self._training_ended = 0.0
        self._batches = BatchReports(channel.emit, self.samples)
        #: Round whose averaging is still under way -> samples computed when the peer went on.
        self._computed: dict[int, int] = {}
        self._sketch: WeightsSketch | None = None
        #: Whether this peer leaves: its own step reaches no other peer from now on.
        self._handing_over = False
        #: Whether this peer has contributed, and leaves the processor to those that have not.
        self._yields = False

    # -- events of the optimizer, from its threads -------------------------------------------------

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        """Forward an event of the optimizer, with the clock and the counted samples."""
        event = events.make_event(kind, **fields)
        if isinstance(event, events.Round):
            event = self._counted(event)
        elif isinstance(event, events.Transition):
            now, computed = self.clock.seconds(), self.samples.computed
            self._computed = {event.round: computed}
            seconds, self._round_ended = now - self._round_ended, now
            measured = {"clock_s": now, "computed": computed, "seconds": seconds}
            event = event.model_copy(update=measured)
        elif isinstance(event, events.StateLoaded):
            event = event.model_copy(update={"lost": self.samples.drop(event.kept or 0)})
        self._preemption.note(event)
        self.channel.emit(event)
        contributed = isinstance(event, events.Round) and event.outcome in events.GROUPED
        if contributed and not self._yields:
            self._yields = True
            yield_to_starting_peers()

    def _counted(self, event: events.Round) -> events.Round:
        """Return the event of a round with the counted samples, the clock and the mean loss."""
        # with delayed gradients it comes late, when the next samples are computed already
        computed = self._computed.pop(event.round, self.samples.computed)
        in_vain = event.outcome == "skipped" or (event.outcome == "local" and self._handing_over)
        entered = 0 if in_vain else event.samples
        return event.model_copy(
            update={
                "samples": entered,
                "computed": computed,
                "lost": self.samples.enter(entered, computed),
                "clock_s": self.clock.seconds(),
                "loss": self._batches.mean_loss(),
            }
        )

    # -- training ----------------------------------------------------------------------------------

    def start(self, trainer: Trainer, module: LightningModule) -> None:
        """Report ready, and wait until all peers are; a joiner waits for one peer of the swarm.

        Raises:
            RuntimeError: A peer that is ready was not seen in time.
        """
        optimizer = swarm_optimizer(trainer)
        self._faults.attach(optimizer)
        parameters = list(optimizer.state_averager.main_parameters)
        self._sketch = WeightsSketch(parameters)
        target = self.fit.workload.target
        self.channel.emit(
            events.PeerReady(
                **payload_fields(self.spec, parameters, optimizer.grad_averager.extras.shapes),
                dense_state_bytes=ELEMENT_BYTES * optimizer.state_averager.total_size,
                batch_size=self.fit.batch_size,
                target=None if target is None else asdict(target),
                data=self.fit.workload.data,
                device=str(module.device),
                arithmetic=arithmetic(module.device),
                processes=optimizer.processes,
                **self.facts,
            )
        )
        self.channel.wait_for(Train)
        self._preemption.take_signals()  # before the event: who reads it may send one at once
        tracker = optimizer.tracker
        if self.spec.joins:
            # without it, a fast peer trains alone until it hears of the swarm, which is lost work
            tracker.wait_for_peers(2, JOIN_TIMEOUT)
        elif not tracker.wait_for_peers(self.spec.peers, ANNOUNCE_TIMEOUT):
            raise RuntimeError(
                f"saw {tracker.swarm.live_peers} of {self.spec.peers} peers "
                f"{ANNOUNCE_TIMEOUT:.0f} s after all were ready"
            )
        self.channel.emit(events.TrainingStarted(round=optimizer.local_epoch))
        self.clock.start()

    def begin_batch(self) -> None:
        """Note the start of a batch."""
        self._preemption.begin_batch()

    def count_samples(self) -> None:
        """Count the samples of a batch."""
        self.samples.computed += self.fit.batch_size

    def after_batch(self, trainer: Trainer, loss: float | None) -> str | None:
        """Keep the loss, and report progress now and then."""
        self._batches.end_batch(loss)
        return None if loss is None or math.isfinite(loss) else "diverged"

    @contextlib.contextmanager
    def after_round(self, trainer: Trainer, round_: int) -> Iterator[str | None]:
        """Report a fingerprint of the weights.

        Measurements do not count on the clock, and are no break for the other peers.
        """
        assert self._sketch is not None
        optimizer = swarm_optimizer(trainer)
        optimizer.begin_batch()
        with self.clock.paused():
            weights = self._sketch(round_, common_parameters(optimizer))
            self.channel.emit(weights)
            yield None if weights.finite else "diverged"
        optimizer.end_batch()

    def after_evaluation(
        self, round_: int, values: dict[str, float], *, clock_s: float, final: bool
    ) -> str | None:
        """Report the values of an evaluation."""
        self.channel.emit(
            events.Evaluation(
                round=round_,
                samples=self.samples.computed,
                clock_s=clock_s,
                values=values,
                final=final,
            )
        )
        return None if math.isfinite(values["loss"]) else "diverged"

    def seconds(self) -> float:
        """Return the training time, without evaluation [s]."""
        return self.clock.seconds()

    def requested_stop(self, trainer: Trainer) -> str | None:
        """Write a checkpoint if one is asked for; return the reason of a command to stop."""
        optimizer = swarm_optimizer(trainer)
        if self.channel.checkpoint_asked:
            self.channel.checkpoint_asked = False
            self.channel.emit(save_checkpoint(trainer, optimizer.local_epoch))
        if self.channel.stop_reason is not None:
            return self.channel.stop_reason
        pending = int(optimizer.grad_averager.local_samples_accumulated)
        is_due = self._preemption.is_due(pending, lambda: self.hand_over(trainer))
        return "notice" if is_due else None

    def hand_over(self, trainer: Trainer) -> None:
        """Run a round with the pending samples, because this peer leaves."""
        self._handing_over = True
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        swarm_optimizer(trainer).hand_over(scaler)

    # -- the end -----------------------------------------------------------------------------------

    def evaluates_at_end(self, trainer: Trainer, reason: str | None, *, evaluated: bool) -> bool:
        """Leave the rounds; return whether to evaluate a last time."""
        swarm_optimizer(trainer).tracker.take_part(False)  # rounds go on without this peer
        self._training_ended = self.clock.seconds()
        return reason not in ("notice", "diverged")

    def end(self, trainer: Trainer, reason: str) -> None:
        """Report the end, and leave together with the other peers."""
        round_ = swarm_optimizer(trainer).local_epoch
        if reason == "notice":
            self._say_goodbye(round_)
            return
        self.channel.emit(
            events.PeerFinished(
                reason=reason,
                round=round_,
                samples=self.samples.computed,
                pending=self.samples.pending,
                clock_s=self._training_ended,
            )
        )
        self.channel.wait_for(Shutdown)

    def fail(self, round_: int, error: BaseException) -> None:
        """Report an error; a peer that was given notice says goodbye instead.

        A peer that has lost a process ends at once: its other processes wait for the dead one.
        """
        if self.channel.notice is None:
            self.channel.fail(error)
            if isinstance(error, PeerProcessDied):
                traceback.print_exception(error)
                leave(1)
        elif not self.channel.has_left:
            self._say_goodbye(round_)
            if isinstance(error, PeerProcessDied):
                leave(0)

    def _say_goodbye(self, round_: int) -> None:
        computed, lost = self.samples.computed, self.samples.drop()
        left = events.Left(round=round_, handed_over=self._preemption.handed_over, lost=lost)
        self.channel.say_goodbye(left, computed, self.clock.seconds())


def save_checkpoint(trainer: Trainer, round_: int) -> events.Checkpoint:
    """Write a checkpoint of a peer, and return its event. Training goes on if that fails."""
    began = time.perf_counter()
    path = Path(tempfile.gettempdir()) / "checkpoints" / "last.ckpt"
    error: str | None = None
    try:
        path.parent.mkdir(exist_ok=True)
        trainer.save_checkpoint(path)
    except Exception as failure:
        error = _name(failure)
    return events.Checkpoint(
        round=round_,
        path=str(path),
        ok=error is None,
        bytes=path.stat().st_size if error is None else 0,
        seconds=time.perf_counter() - began,
        error=error,
    )


def _name(failure: BaseException) -> str:
    """Return the name of the system error at the root of a failure, such as ENOSPC, or its text."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return errno.errorcode.get(cause.errno, repr(failure))
        cause = cause.__cause__ or cause.__context__
    return repr(failure)
