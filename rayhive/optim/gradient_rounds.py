"""Rounds of gradient averaging, and their fallback to the peer's own gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
from hivemind.averaging.control import StepControl
from hivemind.optim.grad_averager import GradientAverager
from hivemind.utils import get_logger

from rayhive.averaging.gradient_averager import RayhiveGradientAverager, accumulated
from rayhive.averaging.group_formation import NoOtherPeers, RoundIsOver
from rayhive.averaging.payload_policy import STALE_WEIGHT
from rayhive.averaging.round_filter import ExcludedRoundFailed
from rayhive.averaging.round_result import round_fields
from rayhive.averaging.step_requests import NOTICE_S
from rayhive.averaging.tensor_summary import floats, norm_of
from rayhive.events import AveragingReason, Fallback, Rejected, Round
from rayhive.events.training import RoundOutcome
from rayhive.optim.factories import optimized_parameters
from rayhive.optim.peer_state import PeerState
from rayhive.optim.replica_check import Announcement, ReplicaCheck, asked_reason

logger = get_logger(__name__)

OnFailure = Literal["local", "skip"]


@dataclass(frozen=True)
class OwnGradients:
    """Accumulated gradients of a peer.

    Attributes:
        sums: Sums over batches: the accumulators themselves, or a copy on the host as float32 if
            these may change during a round.
        scale: Factor that makes them the mean over samples.
    """

    sums: Sequence[torch.Tensor]
    scale: float

    @classmethod
    @torch.no_grad()
    def of(cls, averager: GradientAverager, delayed: bool) -> OwnGradients:
        """Return the gradients that a peer has accumulated.

        Args:
            averager: The gradient averager. Accumulators of rayhive's keep their values when they
                are cleared, until the next batch.
            delayed: Whether the peer goes on to accumulate during the round.
        """
        sums, scale = accumulated(averager)
        stay = isinstance(averager, RayhiveGradientAverager) and not averager.reuse_grad_buffers
        if delayed or not stay:
            sums = [each.detach().to("cpu", torch.float32, copy=True) for each in sums]
        return cls(sums, scale)

    @torch.no_grad()
    def load(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set tensors to the mean over samples."""
        for tensor, gradient in zip(tensors, self.sums, strict=True):
            tensor.copy_(gradient).mul_(self.scale)


@dataclass
class GradientRound:
    """One peer's part in one round of gradient averaging.

    Attributes:
        number: The round.
        samples: Own samples that enter it.
        live_peers: Peers, this one included, that can take part.
        accumulating_s: Time since the peer went on to this round [s].
        background_s: Share of it that was spent waiting for background work [s].
        began: When the round began [s of ``time.perf_counter``].
        measured: Further fields of its ``round`` event.
        own_gradients: Accumulated mean of this peer, for a round that fails.
        skipped: Whether the peer applies nothing in this round.
        unused: Whether it is skipped because averaging failed, and not for what the peer sent.
        can_be_missed: Whether its gradients can enter the next round if other peers have begun
            this one without this peer.
        missed: Whether they have.
        progress_known: Whether all live peers were in the complete group, so that each of them
            knows the progress of all.
    """

    number: int
    samples: int
    live_peers: int
    accumulating_s: float = 0.0
    background_s: float = 0.0
    began: float = field(default_factory=time.perf_counter)
    measured: dict[str, Any] = field(default_factory=dict)
    own_gradients: OwnGradients = field(default_factory=lambda: OwnGradients([], 1.0))
    skipped: bool = False
    unused: bool = False
    can_be_missed: bool = False
    missed: bool = False
    progress_known: bool = False

    def event(self, outcome: RoundOutcome) -> Round:
        """Return the event of the round."""
        return Round(
            round=self.number,
            outcome=outcome,
            samples=self.samples,
            live_peers=self.live_peers,
            accumulating_s=self.accumulating_s,
            background_s=self.background_s,
            **self.measured,
        )


@dataclass(frozen=True)
class GradientRounds:
    """Averages a peer's accumulated gradients and hands them to the inner optimizer.

    Attributes:
        peer: The peer.
        averager: The gradient averager.
        peer_id: The peer's id, as text and as bytes.
        on_failure: Gradients to apply if averaging fails: the peer's own, or none.
        delayed: Whether results are awaited in the background.
        offloaded: Whether the inner optimizer's gradients are the averaged buffers themselves.
        replicas: Compares this peer's replica with those of its groups; None if parameters are
            averaged by schedule.
    """

    peer: PeerState
    averager: GradientAverager
    peer_id: Any
    on_failure: OnFailure
    delayed: bool
    offloaded: bool
    replicas: ReplicaCheck | None = None

    def __post_init__(self) -> None:
        if isinstance(self.averager, RayhiveGradientAverager):
            self.averager.extras.delayed = self.delayed

    def open(self, number: int, *, accumulating_s: float, background_s: float) -> GradientRound:
        """Return the record of a round that this peer is about to begin.

        Args:
            number: The round.
            accumulating_s: Time since the peer went on to this round [s].
            background_s: Share of it that was spent waiting for background work [s].
        """
        live_peers = self.peer.tracker.swarm.live_peers
        if not (self.peer.tracker.swarm.has_company or self.peer.untrained):
            self.peer.consistency.stale = False  # no other peer has newer parameters
        counts = self.peer.consistency.gradients_count
        return GradientRound(
            number=number,
            samples=self._own_samples if counts else 0,
            live_peers=live_peers,
            accumulating_s=accumulating_s,
            background_s=background_s,
            can_be_missed=self.peer.quorum or (self._is_back() and counts),
        )

    def _is_back(self) -> bool:
        """Return whether this peer begins its first round since a break, and could keep it.

        In any other round it steps alone and parameters are averaged: rounds may be shorter than
        the download that follows a missed one.
        """
        is_back, averager = self.peer.consistency.take_return(), self.averager
        if not isinstance(averager, RayhiveGradientAverager) or averager.reuse_grad_buffers:
            return False
        return is_back and not self.delayed and self.peer.local_steps is None

    @property
    def _own_samples(self) -> int:
        local = self.peer.local_steps
        return self.averager.local_samples_accumulated if local is None else local.samples

    def run(self, round_: GradientRound) -> Callable[[], None] | None:
        """Average gradients and hand the result to the inner optimizer.

        Returns:
            A function that waits for the result and hands it over, if that is to be done in the
            background.
        """
        control = self._start(round_)
        if control is None:
            self._finish_without_averaging(round_)
        elif self.delayed:
            return partial(self.finish, control, round_)
        else:
            self.finish(control, round_)
        return None

    def _start(self, round_: GradientRound) -> StepControl | None:
        """Begin to average; return None if there is no other peer, or if that failed."""
        if self.peer.tracker.swarm.live_peers <= 1:
            return None
        self.peer.tracker.pass_on_peers()
        round_.own_gradients = OwnGradients.of(self.averager, self.delayed)
        try:
            control = self.averager.schedule_step(
                gather=self._gathered(round_.number),
                timeout=self.peer.round_timeout,
            )
            return self.averager.step(
                control=control,
                weight=None if self.peer.consistency.gradients_count else STALE_WEIGHT,
                reset_accumulators=not round_.can_be_missed,
                wait=False,
            )
        except Exception as error:
            self.peer.watchdog.check()
            logger.warning(f"could not begin to average gradients: {error!r}")
            round_.measured["error"] = repr(error)
            return None

    def finish(self, control: StepControl, round_: GradientRound) -> None:
        """Wait for the averaged gradients; hand over these, or the peer's own after a failure.

        Raises:
            PeerError: A process of the peer died, or the wait was interrupted.
            RuntimeError: The round is skipped, in the background: no step must follow.
        """
        try:
            result = control.result(self.peer.round_timeout + NOTICE_S)
        except NoOtherPeers:
            if self.peer.tracker.swarm.live_peers > 1:  # a round ahead, or out of reach
                self.peer.consistency.note_failure(round_.number)
            self._restore_own(round_)
            self._end_with_own(round_, "alone")
        except BaseException as error:
            self.peer.watchdog.check()
            if not control.done():
                control.cancel()
            if isinstance(error, RoundIsOver) and self._was_missed(round_):
                return
            round_.measured["error"] = repr(error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self.peer.reporter.refusals(round_.number, error, "gradients")
            self._fall_back(round_, refused=isinstance(error, ExcludedRoundFailed))
        else:
            self._apply(round_, result)
        finally:
            round_.own_gradients = OwnGradients([], 1.0)  # a copy is as large as the model
            if not round_.missed:
                self.peer.tracker.has_ended(
                    "averaged",
                    round_.number,
                    met="group_size" in round_.measured,
                    aloud=not round_.progress_known,
                )
        if self.delayed and round_.skipped:
            if round_.unused and self.peer.local_steps is not None:
                self.peer.local_steps.keep()
            raise RuntimeError("this round is skipped: there are no gradients to apply")

    def _was_missed(self, round_: GradientRound) -> bool:
        """Keep the gradients of a round that other peers have averaged; return whether they have.

        A quorum begins without a late peer, any group without one that comes back just then.
        """
        peer = self.peer
        if not round_.can_be_missed or peer.merges_rounds:
            return False
        limit, check = peer.averaging_timeout, peer.watchdog.check
        round_.missed = peer.tracker.swarm.wait_until_met(round_.number, limit, check)
        if round_.missed:
            cast("RayhiveGradientAverager", self.averager).keep_accumulated_grads()
        return round_.missed

    def _apply(self, round_: GradientRound, result: Any) -> None:
        round_.measured.update(round_fields(result, time.perf_counter() - round_.began))
        self.peer.reporter.refusals(round_.number, result, "gradients")
        group = [peer.to_bytes() for peer in result]
        self.peer.partitions.note_group(group)
        if self.peer.pairs:  # one of the other side is enough: parameters differ in any case
            self.peer.partitions.note_averaged(group, lambda missing: False)
        self.peer.tracker.note_group(round_.number, group)
        if getattr(result, "excluded", False):
            round_.samples = 0
        self._hand_over_averaged()
        if isinstance(self.averager, RayhiveGradientAverager):
            self.averager.extras.arrived = True
            if not self.delayed:
                self.averager.take_extras()
        complete = round_.measured["fraction"] >= 1.0
        if not complete:
            self.peer.consistency.note_failure(round_.number)
        self.peer.consistency.requested = self._averaging_reason(round_.number, result.values())
        everyone = len(result) == round_.live_peers
        round_.progress_known = complete and everyone and not self.delayed
        self._report(round_, "averaged" if complete else "partial")

    def _gathered(self, round_: int) -> list[Any]:
        """Return this peer's entry for a group."""
        reason = self.peer.averaging_reason
        exact, digest = (None, None) if self.replicas is None else self.replicas.summary(round_)
        return Announcement(round_, reason, exact, digest).packed()

    def _averaging_reason(self, round_: int, gathered: Iterable[Any]) -> AveragingReason | None:
        """Return the reason for which this group averages its parameters; None if it need not."""
        if self.peer.pairs:  # each peer has its own, and pairs draw them together
            return None
        announced = [Announcement.read(entry) for entry in gathered]
        differ = self.replicas is not None and self.replicas.differ(round_, announced)
        return asked_reason(announced) or ("replicas_differ" if differ else None)

    def _finish_without_averaging(self, round_: GradientRound) -> None:
        if "error" in round_.measured:
            self._fall_back(round_)
        else:
            self._hand_over_accumulated()
            self._end_with_own(round_, "alone")
        self.peer.tracker.has_ended("averaged", round_.number, met=False)

    def _fall_back(self, round_: GradientRound, refused: bool = False) -> None:
        """Go on after a failure; gradients that other peers refused are not applied here either."""
        choice: OnFailure = "skip" if refused else self.on_failure
        reason = round_.measured["error"]
        self.peer.consistency.note_failure(round_.number)
        if refused:
            round_.samples = 0
            round_.measured["excluded"] = True
        logger.warning(f"averaging failed, going on with {choice}: {reason}")
        self.peer.reporter.emit(Fallback(round=round_.number, reason=reason, choice=choice))
        self._restore_own(round_)
        round_.measured["averaging_s"] = time.perf_counter() - round_.began
        round_.unused = choice == "skip" and not refused
        self._end_with_own(round_, "local" if choice == "local" else "skipped")

    def _end_with_own(self, round_: GradientRound, outcome: RoundOutcome) -> None:
        """Report a round with this peer's own gradients; it is skipped if they are not finite."""
        round_.skipped = outcome == "skipped" or not self._check_own(round_)
        self._report(round_, "skipped" if round_.skipped else outcome)

    def _check_own(self, round_: GradientRound) -> bool:
        """Return whether the gradients that this peer would apply alone are finite."""
        gradients = (parameter.grad for parameter in optimized_parameters(self.peer.state_averager))
        norm = norm_of(floats([gradient for gradient in gradients if gradient is not None]))
        if math.isfinite(norm):
            return True
        self.peer.reporter.refusal(
            Rejected(
                round=round_.number,
                offender=str(self.peer_id),
                tensors="gradients",
                reason="not_finite",
                norm=norm,
                bound=None,
            )
        )
        round_.samples = 0
        return False

    def _report(self, round_: GradientRound, outcome: RoundOutcome) -> None:
        if outcome in ("alone", "local", "skipped"):
            self.peer.partitions.note_group({self.peer_id.to_bytes()})
        self.peer.reporter.emit(round_.event(outcome))

    # -- hand-over to the inner optimizer ----------------------------------------------------------

    def _restore_own(self, round_: GradientRound) -> None:
        """Undo the changes of a failed all-reduce, and hand over this peer's own gradients."""
        with self.averager.get_tensors() as buffers:
            round_.own_gradients.load(buffers[: len(round_.own_gradients.sums)])
        self._hand_over_averaged()

    @torch.no_grad()
    def _hand_over_averaged(self) -> None:
        if not self.offloaded:
            with self.averager.get_tensors() as averaged:
                parameters = optimized_parameters(self.peer.state_averager)
                gradients = averaged[: len(parameters)]
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    parameter.grad.copy_(gradient, non_blocking=True)
                for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
                    torch.cuda.current_stream(device).synchronize()  # next round, others write here
        self.averager.notify_used_averaged_gradients()

    @torch.no_grad()
    def _hand_over_accumulated(self) -> None:
        if self.offloaded:
            self.averager.load_accumulators_into_averager_()
        else:
            gradients, scale = accumulated(self.averager)
            parameters = optimized_parameters(self.peer.state_averager)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                torch.mul(gradient.to(parameter.device), scale, out=parameter.grad)
        self.averager.notify_used_averaged_gradients()
