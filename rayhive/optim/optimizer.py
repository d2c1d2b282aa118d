"""hivemind's optimizer, with rounds that are right when averaging fails and that say what they did.

Differences from :class:`hivemind.Optimizer`, all of them within one run of rayhive peers:

* a failed gradient round applies the peer's own accumulated gradient (or skips the round, by
  option); hivemind resets its accumulators before the result is known and applies zeros;
* parameters that are averaged in the background are waited for before the next step, which
  hivemind lets them undo when they come late;
* a peer without company applies all that it accumulated; hivemind applies its last batch;
* batches count by their samples; hivemind divides their sum by their number;
* gradients and parameters are averaged by peers in the same round only; in hivemind, peers that
  average in the background drift apart and mix their rounds;
* groups form when every live peer is in them, not when the matchmaking window ends;
* a peer that computes is waited for, whatever the matchmaking window, up to a timeout;
* a peer that validates, saves or loads data steps out of the rounds, and comes back at once;
* a peer that comes or falls behind takes over the newest state it can get, and averages with the
  others without counting until its parameters are theirs;
* after a round that failed or was partial, parameters are averaged in the next one;
* when an averager, the DHT or the network daemon dies, that is an error, not a wait for ever;
* ``averager_opts`` reaches both averagers, and no timeout hangs on the matchmaking window;
* every round is reported, with what entered it, what came of it and where the time went.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from hivemind.utils import get_logger

from rayhive.averaging.accumulator import mean_scale
from rayhive.averaging.excluded import ExcludedRoundFailed
from rayhive.averaging.filtered_averager import STALE_WEIGHT
from rayhive.averaging.group_formation import NoOtherPeers
from rayhive.averaging.step_history import NOTICE_S
from rayhive.errors import ConfigError
from rayhive.membership.progress_tracker import STRAGGLER_TIMEOUT_S
from rayhive.optim.components import OnEvent
from rayhive.optim.stepping_out import SteppingOut, group_sizes

logger = get_logger(__name__)


class RayhiveOptimizer(SteppingOut):
    """A :class:`hivemind.Optimizer` whose failures are neither silent nor wrong.

    Takes hivemind's arguments, and:

    Args:
        on_event: Called with the kind and the fields of each event (see
            :data:`rayhive.events.KINDS`), from the training thread or a background thread.
        on_failure: What a peer applies when its gradients could not be averaged: its own
            (``local``) or nothing (``skip``).
        load_state_attempts: How often the state is asked of the peers before giving up.
        straggler_timeout: How long a round waits for a peer that computes and makes no progress,
            until it does [s].

    Raises:
        ConfigError: A ``target_group_size`` was given, which would mean nothing.
    """

    def __init__(
        self,
        *,
        on_event: OnEvent | None = None,
        on_failure: Literal["local", "skip"] = "local",
        load_state_attempts: int = 3,
        averager_opts: dict[str, Any] | None = None,
        matchmaking_time: float = 15.0,
        averaging_timeout: float = 60.0,
        straggler_timeout: float = STRAGGLER_TIMEOUT_S,
        next_chunk_timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._on_event = on_event
        self._on_failure = on_failure
        self._load_state_attempts = load_state_attempts
        self._averager_opts = dict(averager_opts or {})
        if problems := list(group_sizes({**kwargs, "averager_opts": averager_opts})):
            raise ConfigError(problems)
        self._straggler_timeout = straggler_timeout
        self._local_gradients: tuple[torch.Tensor, ...] | None = None
        self._record: dict[str, Any] = {}
        self._average_state_soon = self._quiet = False
        #: Whether this peer has heard what came of the last averaging of parameters.
        self._state_told = threading.Event()
        self._state_told.set()
        if next_chunk_timeout is None:
            next_chunk_timeout = max(matchmaking_time, averaging_timeout / 3)
        # hivemind takes the DHT's mode only if another one was given
        kwargs["client_mode"] = kwargs["dht"].client_mode
        super().__init__(
            averager_opts=averager_opts,
            matchmaking_time=matchmaking_time,
            averaging_timeout=averaging_timeout,
            next_chunk_timeout=next_chunk_timeout,
            **kwargs,
        )
        if not self.use_gradient_averaging:
            self.tracker.comes_first = "synchronised"
        self.tracker.start()
        self._watch = self._watch_processes()
        self.tracker.follow(self._tell_members, self._on_break)

    # -- rounds ------------------------------------------------------------------------------

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
        self._watch.check()
        self.tracker.check()
        self.begin_batch()
        self.tracker.take_part(True)
        try:
            return super().step(closure, batch_size, grad_scaler)
        finally:
            self._watch.check()

    def hand_over(self, grad_scaler: Any = None) -> None:
        """Do the round now, with the samples that there are: this peer is about to leave."""
        self._watch.check()
        self.tracker.hurry(self.local_epoch + 1)
        # only gradients in reused buffers are still scaled
        scales = self.use_gradient_averaging and self.grad_averager.reuse_grad_buffers
        self._update_global_epoch(grad_scaler if scales else None)

    def _maybe_schedule_gradient_averaging(self) -> None:
        """Do nothing: a group forms at once when its round is due."""

    def _maybe_schedule_state_averaging(self) -> None:
        """Do nothing: a group forms at once when its round is due."""

    def _update_global_epoch(self, grad_scaler: Any) -> None:
        self._quiet = False
        if self._schema_hash != self._compute_schema_hash():
            raise RuntimeError("parameters or gradients were replaced between two steps")
        if self.use_gradient_averaging and self._take_over_missed_round():
            return
        self.tracker.enter(self.local_epoch + 1)
        with self.tracker.pause_updates():
            finish_gradients: Callable[[], None] | None = None
            if self.use_gradient_averaging:
                self._record = self._begin_record()
                control = self._start_gradient_round(grad_scaler)
                if control is None:
                    self._use_own_gradients(self._record, "alone")
                elif self.delay_grad_averaging:
                    finish_gradients = partial(self._finish_gradient_round, control, self._record)
                else:
                    self._finish_gradient_round(control, self._record)
            self._advance(grad_scaler, finish_gradients)

    def _begin_record(self) -> dict[str, Any]:
        averager = self.grad_averager
        ready = time.perf_counter()
        if self.delay_optimizer_step:
            self._finish_background()
        if self.live_peers <= 1:
            self._stale = False  # nobody is left whose parameters are newer
        began = time.perf_counter()
        return {
            "round": self.local_epoch + 1,
            "samples": 0 if self._counts_for_nothing else averager.local_samples_accumulated,
            "live_peers": self.live_peers,
            "accumulating_s": began - self._went_on,
            "background_s": began - ready,
            "began": began,
        }

    def _start_gradient_round(self, grad_scaler: Any) -> Any:
        """Begin to average gradients; return the round's control, or None without company."""
        if grad_scaler is not None:
            with grad_scaler.running_global_step():
                assert grad_scaler.unscale_(self)
        if self.before_round is not None:
            self.before_round(self.local_epoch + 1, self.grad_averager)
        if self.live_peers <= 1:
            return None
        self._local_gradients = self._copy_accumulated()
        try:
            control = self.grad_averager.schedule_step(
                # the round names the group; the other says whether parameters must be averaged
                gather=[self.local_epoch + 1, self._stale or self._astray > 0],
                timeout=self._step_timeout,
            )
            return self.grad_averager.step(
                control=control,
                weight=STALE_WEIGHT if self._counts_for_nothing else None,
                reset_accumulators=True,
                wait=False,
            )
        except Exception as error:
            self._watch.check()
            logger.warning(f"could not begin to average gradients: {error!r}")
            self._record["error"] = repr(error)
            return None

    @torch.no_grad()
    def _copy_accumulated(self) -> tuple[torch.Tensor, ...]:
        scale = mean_scale(self.grad_averager)
        return tuple(
            gradient.detach().to("cpu", torch.float32, copy=True).mul_(scale)
            for gradient in self.grad_averager._grad_accumulators()
        )

    def _finish_gradient_round(self, control: Any, record: dict[str, Any]) -> None:
        """Wait for the averaged gradients and hand them, or the peer's own, to the optimizer."""
        try:
            result = control.result(self._step_timeout + NOTICE_S)
        except NoOtherPeers:
            if self.live_peers > 1:  # they are a round ahead, or do not meet
                self._astray = record["round"]
            self._restore_own_gradients()
            self._end_own(record, "alone")
        except BaseException as error:
            self._watch.check()
            if not control.done():
                control.cancel()
            record["error"] = repr(error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self._emit_refusals(record["round"], error, "gradients")
            self._fall_back(record, refused=isinstance(error, ExcludedRoundFailed))
        else:
            self._read_result(record, result)
            self._load_averaged_gradients_into_optimizer_()
            complete = record["fraction"] >= 1.0
            if not complete:
                self._astray = record["round"]
            self._average_state_soon = any(_wants_state(wish) for wish in result.values())
            # All who were in a complete group know how far each of them is.
            self._quiet = (
                complete and len(result) == record["live_peers"] and not self.delay_grad_averaging
            )
            self._emit_round(record, "averaged" if complete else "partial")
        finally:
            self.tracker.has_ended(
                "averaged", record["round"], met="group_size" in record, aloud=not self._quiet
            )
        if self.delay_grad_averaging and "skip" in record:
            raise RuntimeError("this round is skipped: there are no gradients to apply")

    def _fall_back(self, record: dict[str, Any], refused: bool = False) -> None:
        choice = "skip" if refused else self._on_failure  # what others refuse is not applied here
        self._astray = record["round"]
        record.update({"samples": 0, "excluded": True} if refused else {})
        logger.warning(f"averaging failed, going on with {choice}: {record['error']}")
        self._emit("fallback", round=record["round"], reason=record["error"], choice=choice)
        self._restore_own_gradients()
        record["averaging_s"] = time.perf_counter() - record["began"]
        self._end_own(record, "local" if choice == "local" else "skipped")

    def _end_own(self, record: dict[str, Any], outcome: str) -> None:
        """Report a round in which this peer applies its own gradients, unless they are corrupt."""
        skips = outcome == "skipped" or self._refuses_own(record)
        self._emit_round(record, "skipped" if skips else outcome)
        if skips:
            record["skip"] = True

    @torch.no_grad()
    def _restore_own_gradients(self) -> None:
        """Undo what a failed all-reduce left in the buffers."""
        with self.grad_averager.get_tensors() as buffers:
            for buffer, gradient in zip(buffers, self._local_gradients or (), strict=True):
                buffer.copy_(gradient)
        self._load_averaged_gradients_into_optimizer_()

    def _use_own_gradients(self, record: dict[str, Any], outcome: str) -> None:
        if "error" in record:
            self._fall_back(record)
        else:
            self._load_own_gradients()
            self._end_own(record, outcome)
        self.tracker.has_ended("averaged", record["round"], met=False)

    @torch.no_grad()
    def _load_own_gradients(self) -> None:
        """Hand what was accumulated to the optimizer."""
        averager = self.grad_averager
        if self.offload_optimizer:  # its gradients are the buffers that are averaged
            averager.load_accumulators_into_averager_()
        else:
            scale = mean_scale(averager)
            for parameter, accumulated in zip(
                self._optimized_parameters(), averager._grad_accumulators(), strict=True
            ):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                torch.mul(accumulated.to(parameter.device), scale, out=parameter.grad)
        averager.notify_used_averaged_gradients()

    def _advance(
        self,
        grad_scaler: Any,
        finish_gradients: Callable[[], None] | None,
    ) -> None:
        """Step the optimizer, average parameters if it is their turn, and begin the next round."""
        averager = self.state_averager
        if self.delay_state_averaging and not averager.delta_rule_averaging:
            # parameters averaged in the background replace the local ones: arriving after this
            # round's step, which hivemind allows, they would undo it
            self._finish_background()
        next_round = self.local_epoch + 1
        steps = not self.auxiliary and not self.use_local_updates and "skip" not in self._record
        control = self._state_control(next_round)
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
            averaging_opts={"timeout": self._step_timeout} if control is not None else None,
        )
        self._record["update_s"] = time.perf_counter() - before
        self.tracker.update_epoch(averager.local_epoch, aloud=not self._quiet)
        self._went_on = time.perf_counter()
        if not self.client_mode:
            averager.state_sharing_priority = self.local_epoch
        if self.use_gradient_averaging and not self.auxiliary:
            self.grad_averager.reset_accumulated_grads_()
            if not self.client_mode:
                self.grad_averager.state_sharing_priority = self.local_epoch
        self._emit("transition", round=self.local_epoch, update_s=self._record["update_s"])

    def _state_control(self, next_round: int) -> Any:
        """Return the control of this round's state averaging, or None if there is none."""
        soon, self._average_state_soon = self._average_state_soon, False
        due = (
            self.live_peers > 1
            and (soon or next_round % self.average_state_every == 0)
            and not self.state_averager.averaging_in_progress
        )
        if not due:
            self.tracker.has_ended("synchronised", next_round, met=False, aloud=False)
            return None
        try:
            control = self.state_averager.schedule_step(
                gather=self._state_gather(next_round), timeout=self._step_timeout
            )
        except Exception as error:  # as with gradients: it may have been stopped for a while
            self._watch.check()
            logger.warning(f"could not begin to average parameters: {error!r}")
            self._astray = next_round
            self.tracker.has_ended("synchronised", next_round, met=False)
            return None
        if self._stale:
            control.weight = STALE_WEIGHT
        began = time.perf_counter()
        self._state_told.clear()
        control.add_done_callback(partial(self._end_state_round, next_round, began))
        return control

    def _end_state_round(self, round_: int, began: float, control: Any) -> None:
        try:
            complete = self._emit_state_round(round_, began, control)
            if complete:
                self._stale = self._settling = self._keeps = False
                if self._astray <= round_:  # a later one may have failed in the meantime
                    self._astray = 0
                group = {peer.to_bytes() for peer in control.result()}
                if self._lost & group and not self.tracker.any_here(self._lost - group):
                    self._apart, self._lost = None, frozenset()
            self.tracker.has_ended("synchronised", round_, met=complete, aloud=not complete)
        finally:
            self._state_told.set()

    def shutdown(self) -> None:
        """Say goodbye to the peers and end the averagers."""
        self._watch.expect_ends()
        try:
            self.state_averager.step(wait_for_delayed_updates=True)
            super().shutdown()
        finally:
            self._watch.close()


def _wants_state(gathered: Any) -> bool:
    return isinstance(gathered, (list, tuple)) and len(gathered) > 1 and bool(gathered[1])
