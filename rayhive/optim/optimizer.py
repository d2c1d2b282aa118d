"""hivemind's optimizer with rounds that stay correct when averaging fails, and that are reported.

Failed rounds, unequal batches, background work, groups, waiting, joining and the death of processes
differ from :class:`hivemind.Optimizer`, within a run of rayhive peers only. ``docs/rounds.md`` has
the list, with the tests that show it. Every round is reported: its samples, outcome and times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import hivemind
import torch
from hivemind.optim.grad_averager import GradientAverager

from rayhive.averaging.quorum import GRACE_S
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.events import SteppedOut, Transition
from rayhive.membership.progress_tracker import STRAGGLER_TIMEOUT_S, LiveProgressTracker
from rayhive.membership.view import Member
from rayhive.optim import background, factories
from rayhive.optim.gradient_rounds import GradientRound, GradientRounds, OnFailure
from rayhive.optim.interrupts import DeferredInterrupts
from rayhive.optim.local_rule import InnerState, LocalStepsRule
from rayhive.optim.local_steps import LocalSteps
from rayhive.optim.parameter_rounds import ParameterRounds, period_of
from rayhive.optim.peer_state import EventReporter, OnEvent, PeerState
from rayhive.optim.replica_check import ReplicaCheck
from rayhive.optim.state_sync import StateSync
from rayhive.optim.watchdog import PeerProcessDied, PeerProcesses
from rayhive.spec import Aggregation, OutlierFilterRule

#: Longest wait at shutdown for background work of a run that was interrupted or failed [s].
ABANDON_S = 2.0


class RayhiveOptimizer(hivemind.Optimizer):
    """A :class:`hivemind.Optimizer` whose failures are neither silent nor wrong.

    Takes hivemind's arguments, and the following.

    Args:
        on_event: Called with the kind and the fields of each event (see
            :data:`rayhive.events.KINDS`), from the training thread or a background thread.
        on_failure: Gradients to apply when averaging failed: own (``local``) or none (``skip``).
        load_state_attempts: Downloads of the state to try before the peer keeps its own.
        straggler_timeout: How long a round waits for a peer that computes without progress [s].
        outlier_filter: Rule by which a group refuses tensors, see
            :func:`rayhive.averaging.outlier_filter.judge`.
        average_state_every: Rounds between two averagings of the parameters. ``auto`` averages them
            and optimizer statistics after a failed or partial round, a join or a partition, and
            where replicas differ; extra tensors with the gradients, see :func:`period_of`.
        aggregation: How a reducer aggregates gradients, see :mod:`rayhive.averaging.aggregation`.
        error_feedback: Whether the errors of a lossy codec enter the next round, see
            :mod:`rayhive.averaging.error_feedback`.
        min_peers: Peers with which a round begins although others compute; None awaits all.
        grace_s: Wait for the others once these are there [s], :mod:`rayhive.averaging.quorum`.
        trusted_network: Send parts unencrypted to peers that agree; both sides are authenticated.
        local_steps: Batches of the swarm in a round of :mod:`rayhive.optim.local_steps`, or None.
        outer_lr: As of :class:`rayhive.optim.local_rule.LocalStepsRule`; None is the default there.
        outer_momentum: The same.
        inner_state: The same.
        fragments: The same.
        mixing: The same.
        group_size: The same.

    Attributes:
        before_round: Called before a round's gradients are averaged, with its number and the
            averager; it may return a function to call if other peers average without this one.
        local_steps: The peer's local parameters and inner optimizer; None without local steps.

    Raises:
        ConfigError: ``target_group_size`` or settings of local steps are not valid, or
            ``use_local_updates`` is given: ``local_steps`` does what it is for.
    """

    tracker: LiveProgressTracker
    state_averager: RayhiveStateAverager
    grad_averager: GradientAverager
    before_round: Callable[[int, GradientAverager], Callable[[], None] | None] | None = None
    local_steps: LocalSteps | None = None

    def __init__(
        self,
        *,
        on_event: OnEvent | None = None,
        on_failure: OnFailure = "local",
        load_state_attempts: int = 3,
        averager_opts: dict[str, Any] | None = None,
        matchmaking_time: float = 15.0,
        averaging_timeout: float = 60.0,
        straggler_timeout: float = STRAGGLER_TIMEOUT_S,
        next_chunk_timeout: float | None = None,
        outlier_filter: OutlierFilterRule = "norm",
        aggregation: Aggregation = "mean",
        error_feedback: bool = False,
        average_state_every: int | Literal["auto"] = "auto",
        min_peers: int | None = None,
        grace_s: float = GRACE_S,
        trusted_network: bool = False,
        local_steps: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        inner_state: InnerState | None = None,
        fragments: int | None = None,
        mixing: float | None = None,
        group_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        factories.refuse_group_size({**kwargs, "averager_opts": averager_opts})
        rule = LocalStepsRule.read(
            {
                **kwargs,
                "average_state_every": average_state_every,
                "aggregation": aggregation,
                "min_peers": min_peers,
            },
            local_steps, outer_lr, outer_momentum, inner_state, fragments, mixing, group_size,
        )  # fmt: skip
        if rule is not None:
            inner, kwargs = rule.outer_arguments(**kwargs)
        self._period, extras = period_of(average_state_every, aggregation, **kwargs)
        self._rules = factories.averager_rules(
            outlier_filter, aggregation, error_feedback, trusted_network, min_peers, grace_s, extras
        )
        self._averager_opts, self._straggler_timeout = averager_opts or {}, straggler_timeout
        # hivemind takes the DHT's mode only if another one was given
        kwargs["client_mode"] = kwargs["dht"].client_mode
        super().__init__(
            averager_opts=averager_opts,
            matchmaking_time=matchmaking_time,
            averaging_timeout=averaging_timeout,
            next_chunk_timeout=next_chunk_timeout or max(matchmaking_time, averaging_timeout / 3),
            average_state_every=self._period or 1,
            **kwargs,
        )
        if rule is not None:
            self.local_steps = LocalSteps.of(rule, inner, self)
        self.tracker.start()
        self._processes = PeerProcesses(
            self.dht, gradient_averager=self.grad_averager, state_averager=self.state_averager
        )
        self._watchdog = self._processes.watch(self._on_death)
        self._interrupts = DeferredInterrupts(self._watchdog.interrupt, self._watchdog.resume)
        self._peer = PeerState(
            tracker=self.tracker,
            state_averager=self.state_averager,
            grad_averager=self.grad_averager,
            watchdog=self._watchdog,
            reporter=EventReporter(on_event),
            averaging_timeout=averaging_timeout,
            round_timeout=averaging_timeout + straggler_timeout,
            local_steps=self.local_steps,
        )
        self.tracker.view.sign_of = self._peer.sign_of
        self._state_sync = StateSync(self._peer, self.load_state_timeout, load_state_attempts)
        self._parameter_rounds = ParameterRounds(self._peer, self._state_sync, self._period)
        self._gradient_rounds = GradientRounds(
            peer=self._peer,
            averager=self.grad_averager,
            peer_id=self.dht.peer_id,
            on_failure=on_failure,
            delayed=self.delay_grad_averaging,
            offloaded=self.offload_optimizer,
            replicas=None if self.auxiliary else ReplicaCheck.of(self._peer, self._period),
        )
        self.tracker.follow(self._pass_on_members, self._on_break)

    def __del__(self) -> None:
        if hasattr(self, "_gradient_rounds"):  # otherwise construction failed
            super().__del__()

    def _make_progress_tracker(self, target_batch_size: int, **kwargs: Any) -> LiveProgressTracker:
        options = {"straggler_timeout": self._straggler_timeout, "quorum": "quorum" in self._rules}
        return factories.make_tracker(self, target_batch_size, **options, **kwargs)

    def _make_state_averager(self, **kwargs: Any) -> RayhiveStateAverager:
        kwargs["all_statistics"] = self._period is None
        return factories.make_state_averager(self, self._rules, **kwargs)

    def _make_gradient_averager(
        self, factory: Callable[..., GradientAverager] | None, **kwargs: Any
    ) -> GradientAverager:
        options = {**self._averager_opts, **kwargs}
        return factories.make_gradient_averager(self, factory, self._rules, **options)

    # -- the peer ----------------------------------------------------------------------------------

    @property
    def live_peers(self) -> int:
        """Peers, this one included, that can take part in the next round."""
        return self.tracker.swarm.live_peers

    @property
    def processes(self) -> dict[str, int]:
        """The processes that this peer consists of: role -> pid."""
        return self._processes.pids

    @property
    def param_groups(self) -> Any:
        """Parameter groups of the optimizer that steps the module's parameters."""
        local = self.local_steps
        return super().param_groups if local is None else local.inner.param_groups

    def _pass_on_members(
        self, kind: str, members: tuple[Member, ...], lost: frozenset[bytes]
    ) -> None:
        averager: Any = self.grad_averager if kind == "averaged" else self.state_averager
        if hasattr(averager, "set_members"):  # a user's own averager may not have it
            averager.set_members(members, lost)

    def _on_break(self) -> None:
        self._peer.reporter.emit(SteppedOut(round=self.local_epoch))

    def _on_death(self, error: PeerProcessDied) -> None:
        self.tracker.take_part(False)  # if the announcement still reaches other peers
        self._processes.kill_averagers()

    # -- batches -----------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Announce the start of a batch; take part again first if this peer stepped out.

        Call it before the forward pass, because newer parameters may be downloaded.
        """
        with self._interrupts:
            self._state_sync.return_from_break()
            self._state_sync.note_batch()

    def end_batch(self) -> None:
        """Announce the end of a batch. If no batch begins soon, this peer steps out."""
        with self._interrupts:
            self.tracker.end_batch()

    def step(
        self,
        closure: Callable[[], torch.Tensor] | None = None,
        batch_size: int | None = None,
        grad_scaler: Any = None,
    ) -> Any:
        """Accumulate a batch, and take part in a round when one is due; see hivemind.

        Raises:
            PeerProcessDied: An averager, the DHT or the network daemon has died.
            PeerError: This peer has lost contact with the swarm.
        """
        with self._interrupts:
            self._watchdog.check()
            self.tracker.check()
            self._state_sync.return_from_break()
            self.tracker.take_part(True)
            background.take_extras(self._peer)
            try:
                return super().step(self._interrupts.during(closure), batch_size, grad_scaler)
            finally:
                self._watchdog.check()

    def _check_and_accumulate_gradients(self, batch_size: int, grad_scaler: Any) -> bool:
        if self.local_steps is None:
            return bool(super()._check_and_accumulate_gradients(batch_size, grad_scaler))
        self.local_steps.step(batch_size)
        samples = self.local_steps.averager.local_samples_accumulated
        self.tracker.report_local_progress(self.local_epoch, samples)
        return True

    def hand_over(self, grad_scaler: Any = None) -> None:
        """Run the next round at once with the present samples, because this peer leaves."""
        with self._interrupts:
            self._watchdog.check()
            self.tracker.hurry(self.local_epoch + 1)
            scaled = self.grad_averager.reuse_grad_buffers
            self._update_global_epoch(grad_scaler if scaled else None)

    # -- rounds ------------------------------------------------------------------------------------

    def _maybe_schedule_gradient_averaging(self) -> None:
        """Wait for a round that is almost due; its group forms at once when it is."""
        self.tracker.wait_for_last_batches(self._watchdog.check)

    def _maybe_schedule_state_averaging(self) -> None:
        """Do nothing: a group forms at once when its round is due."""

    def _update_global_epoch(self, grad_scaler: Any) -> None:
        if self._schema_hash != self.state_averager.between_steps(self._compute_schema_hash):
            raise RuntimeError("parameters or gradients were replaced between two steps")
        while self._state_sync.catch_up() and not self._run_round(grad_scaler):
            pass  # missed: catch up again

    def _run_round(self, grad_scaler: Any) -> bool:
        """Run the next round; return False if other peers have averaged it without this one."""
        rounds = self._gradient_rounds
        self.tracker.enter(self.local_epoch + 1)
        with self.tracker.pause_updates():
            ready = time.perf_counter()
            if self.delay_optimizer_step or (self.delay_state_averaging and self.local_steps):
                background.finish(self._peer)
            if self.local_steps is not None:
                self.local_steps.take(self.local_epoch + 1)
            began = time.perf_counter()
            round_ = rounds.open(
                self.local_epoch + 1,
                accumulating_s=began - self._state_sync.round_began,
                background_s=began - ready,
            )
            if grad_scaler is not None:
                with grad_scaler.running_global_step():
                    assert grad_scaler.unscale_(self)
            undo = self.before_round and self.before_round(round_.number, rounds.averager)
            finish_gradients = rounds.run(round_)
            if not round_.missed:
                self._advance(grad_scaler, round_, finish_gradients)
                return True
            if undo is not None:
                undo()
            if self.local_steps is not None:
                self.local_steps.put_back()
            return False

    def _advance(
        self,
        grad_scaler: Any,
        round_: GradientRound,
        finish_gradients: Callable[[], None] | None,
    ) -> None:
        """Step the inner optimizer, average parameters if it is their turn, and go on.

        In the background, ``finish_gradients`` waits for the gradients of the round.
        """
        averager = self.state_averager
        if self.delay_state_averaging:
            # parameters averaged in the background replace the local ones: arriving after this
            # round's step, which hivemind allows, they would undo it
            background.finish(self._peer)
        steps = not self.auxiliary and not round_.skipped
        if self.local_steps is not None:
            if round_.unused:
                self.local_steps.keep()
            self.local_steps.end_round(round_.skipped)
        control = self._parameter_rounds.begin(self.local_epoch + 1)
        before = time.perf_counter()
        averager.step(
            increment_epoch=True,
            wait_for_trigger=finish_gradients if steps else None,
            optimizer_step=steps,
            delay_optimizer_step=self.delay_optimizer_step and steps,
            grad_scaler=grad_scaler,
            averaging_round=control is not None,
            delay_averaging=self.delay_state_averaging and not self.auxiliary,
            averaging_control=control,
            averaging_opts=None if control is None else {"timeout": self._peer.round_timeout},
        )
        update_s = time.perf_counter() - before
        self.tracker.update_epoch(averager.local_epoch, aloud=not round_.progress_known)
        began, self._state_sync.round_began = self._state_sync.round_began, time.perf_counter()
        seconds = self._state_sync.round_began - began
        self._state_sync.share_round(self.local_epoch)
        if not self.auxiliary:
            self.grad_averager.reset_accumulated_grads_()
        event = Transition(round=self.local_epoch, seconds=seconds, update_s=update_s)
        self._peer.reporter.emit(event)

    # -- state -------------------------------------------------------------------------------------

    def _should_load_state_from_peers(self) -> bool:
        return self._state_sync.needs_download()

    def load_state_from_peers(self, *, keep_gradients: bool = False, **kwargs: Any) -> None:
        """Download the newest state of the swarm; see :meth:`StateSync.download`."""
        with self._interrupts:
            self._state_sync.download(keep_gradients=keep_gradients, **kwargs)

    def restore_round(self, round_: int) -> None:
        """Go to the beginning of a round after the state was loaded from a checkpoint."""
        self._state_sync.restore(round_)

    def settle(self) -> None:
        """Wait for background work, and apply its results to the parameters.

        Raises:
            PeerError: The work does not end, or a process of the peer died.
        """
        with self._interrupts:
            background.finish(self._peer)

    def shutdown(self, *, abandon: bool = False) -> None:
        """Say goodbye to the other peers and end the averagers.

        After an interruption or a failure, ``abandon`` cancels background work soon.
        """
        with self._interrupts:
            self._watchdog.expect_ends()
            try:
                background.end(self._peer, ABANDON_S if abandon else self.averaging_timeout)
                self.tracker.shutdown(self.shutdown_timeout)
                self.state_averager.shutdown()
                self.grad_averager.shutdown()
            finally:
                self._watchdog.close()
