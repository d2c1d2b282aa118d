"""hivemind's optimizer, with rounds that are right when averaging fails and that say what they did.

Differences from :class:`hivemind.Optimizer`, all of them within one run of rayhive peers:

* a failed gradient round applies the peer's own accumulated gradient (or skips the round, by
  option); hivemind resets its accumulators before the result is known and applies zeros;
* parameters that are averaged in the background are waited for before the next step, which
  hivemind lets them undo when they come late;
* a peer without company applies all that it accumulated; hivemind applies its last batch;
* gradients and parameters are averaged by peers in the same round only; in hivemind, peers that
  average in the background drift apart and mix their rounds;
* groups form when every live peer is in them, not when the matchmaking window ends;
* ``averager_opts`` reaches both averagers, and no timeout hangs on the matchmaking window;
* every round is reported, with what entered it, what came of it and where the time went.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from hivemind.averaging.control import AveragingStage
from hivemind.utils import get_dht_time, get_logger

from rayhive.peer.averaging import round_fields
from rayhive.peer.parts import OnEvent, SwarmParts

logger = get_logger(__name__)


class RayhiveOptimizer(SwarmParts):
    """A :class:`hivemind.Optimizer` whose failures are neither silent nor wrong.

    Takes hivemind's arguments, and:

    Args:
        on_event: Called with the kind and the fields of each event (see
            :data:`rayhive.events.KINDS`), from the training thread or a background thread.
        on_failure: What a peer applies when its gradients could not be averaged: its own
            (``local``) or nothing (``skip``).
        load_state_attempts: How often the state is asked of the peers before giving up.
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
        next_chunk_timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        self._on_event = on_event
        self._on_failure = on_failure
        self._load_state_attempts = load_state_attempts
        self._averager_opts = dict(averager_opts or {})
        self._local_gradients: tuple[torch.Tensor, ...] | None = None
        self._record: dict[str, Any] = {}
        if next_chunk_timeout is None:
            next_chunk_timeout = max(matchmaking_time, averaging_timeout / 3)
        super().__init__(
            averager_opts=averager_opts,
            matchmaking_time=matchmaking_time,
            averaging_timeout=averaging_timeout,
            next_chunk_timeout=next_chunk_timeout,
            **kwargs,
        )

    # -- rounds ------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Accumulate a batch, and take part in a round when one is due; see hivemind."""
        self._follow_live_peers()
        return super().step(*args, **kwargs)

    def _should_load_state_from_peers(self) -> bool:
        """Say whether this peer has missed a round.

        One that is a round behind can still take part in the round that the others have begun;
        hivemind may make it throw its samples away and download the state instead, while the
        others wait for it.
        """
        return bool(self.local_epoch < self.tracker.global_epoch - 1)

    def _maybe_schedule_gradient_averaging(self) -> None:
        """Look for the group of the next round when the round is due within the window."""
        ready_s = self.tracker.estimated_next_update_time - get_dht_time()
        control = self.scheduled_grads
        if ready_s <= self.matchmaking_time and (
            control is None or control.triggered or control.done()
        ):
            self.scheduled_grads = self._seek_gradient_group()

    def _seek_gradient_group(self) -> Any:
        # what is gathered also names the group: only peers in the same round meet
        return self.grad_averager.schedule_step(
            gather=self.local_epoch + 1, timeout=self.averaging_timeout
        )

    def _update_global_epoch(self, grad_scaler: Any) -> None:
        if self._schema_hash != self._compute_schema_hash():
            raise RuntimeError("parameters or gradients were replaced between two steps")
        began = time.perf_counter()
        with self.tracker.pause_updates():
            finish_gradients: Callable[[], None] | None = None
            if self.use_gradient_averaging:
                if self.delay_optimizer_step:
                    self.state_averager.step(wait_for_delayed_updates=True)
                self._record = self._begin_record()
                control = self._start_gradient_round(grad_scaler)
                if control is None:
                    self._use_own_gradients(self._record, "alone")
                elif self.delay_grad_averaging:
                    finish_gradients = partial(self._finish_gradient_round, control, self._record)
                else:
                    self._finish_gradient_round(control, self._record)
            self._advance(grad_scaler, finish_gradients, began)

    def _begin_record(self) -> dict[str, Any]:
        averager = self.grad_averager
        return {
            "round": self.local_epoch + 1,
            "samples": averager.local_samples_accumulated,
            "live_peers": self.live_peers,
            "began": time.perf_counter(),
        }

    def _start_gradient_round(self, grad_scaler: Any) -> Any:
        """Begin to average gradients; return the round's control, or None without company."""
        if grad_scaler is not None:
            with grad_scaler.running_global_step():
                assert grad_scaler.unscale_(self)
        control, self.scheduled_grads = self.scheduled_grads, None
        if control is not None and (control.triggered or control.done()):
            control = None  # its matchmaking failed; look for a group anew
        if self.tracker.global_progress.num_peers <= 1:
            if control is not None:
                control.cancel()
            return None
        self._local_gradients = self._copy_accumulated()
        try:
            if control is None:
                control = self._seek_gradient_group()
            return self.grad_averager.step(control=control, reset_accumulators=True, wait=False)
        except Exception as error:
            logger.warning(f"could not begin to average gradients: {error!r}")
            self._record["error"] = repr(error)
            return None

    @torch.no_grad()
    def _copy_accumulated(self) -> tuple[torch.Tensor, ...]:
        averager = self.grad_averager
        scale = 1.0 / max(1, averager.local_times_accumulated)
        return tuple(
            gradient.detach().to("cpu", torch.float32, copy=True).mul_(scale)
            for gradient in averager._grad_accumulators()
        )

    def _finish_gradient_round(self, control: Any, record: dict[str, Any]) -> None:
        """Wait for the averaged gradients and hand them, or the peer's own, to the optimizer."""
        try:
            result = control.result(self.averaging_timeout)
        except BaseException as error:
            if not control.done():
                control.cancel()
            record["error"] = repr(error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            self._fall_back(record)
            return
        fraction = getattr(result, "fraction", 1.0)
        record.update(round_fields(result, time.perf_counter() - record["began"]))
        self._load_averaged_gradients_into_optimizer_()
        self._emit_round(record, "averaged" if fraction >= 1.0 else "partial")

    def _fall_back(self, record: dict[str, Any]) -> None:
        logger.warning(f"averaging failed, going on with {self._on_failure}: {record['error']}")
        self._emit(
            "fallback", round=record["round"], reason=record["error"], choice=self._on_failure
        )
        self._restore_own_gradients()
        record["averaging_s"] = time.perf_counter() - record["began"]
        self._emit_round(record, "local" if self._on_failure == "local" else "skipped")
        if self._on_failure == "skip":
            record["skip"] = True
            if self.delay_grad_averaging:
                raise RuntimeError("this round is skipped: its gradients could not be averaged")

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
            return
        self.grad_averager.load_accumulators_into_averager_()
        self._load_averaged_gradients_into_optimizer_()
        self._emit_round(record, outcome)

    def _advance(
        self,
        grad_scaler: Any,
        finish_gradients: Callable[[], None] | None,
        began: float,
    ) -> None:
        """Step the optimizer, average parameters if it is their turn, and begin the next round."""
        averager = self.state_averager
        if self.delay_state_averaging and not averager.delta_rule_averaging:
            # parameters averaged in the background replace the local ones: arriving after this
            # round's step, which hivemind allows, they would undo it
            averager.step(wait_for_delayed_updates=True)
        next_round = self.local_epoch + 1
        steps = not self.auxiliary and not self.use_local_updates and "skip" not in self._record
        control = self._state_control(next_round)
        if control is not None:
            self.delay_before_state_averaging.update(
                task_size=1, interval=time.perf_counter() - began
            )
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
            averaging_opts={"timeout": self.averaging_timeout} if control is not None else None,
        )
        self._record["update_s"] = time.perf_counter() - before
        self.tracker.update_epoch(new_epoch=averager.local_epoch)
        self._should_check_synchronization_on_update = True
        if not self.client_mode:
            averager.state_sharing_priority = self.local_epoch
        if self.use_gradient_averaging and not self.auxiliary:
            self.grad_averager.reset_accumulated_grads_()
            if not self.client_mode:
                self.grad_averager.state_sharing_priority = self.local_epoch
        self._emit("transition", round=self.local_epoch, update_s=self._record["update_s"])

    def _state_control(self, next_round: int) -> Any:
        """Return the control of this round's state averaging, or None if there is none."""
        control, self.scheduled_state = self.scheduled_state, None
        due = (
            self.tracker.global_progress.num_peers > 1
            and next_round % self.average_state_every == 0
            and not self.state_averager.averaging_in_progress
        )
        if control is not None and (not due or control.triggered or control.done()):
            if not control.done():
                control.cancel()
            control = None
        if not due:
            return None
        if control is None:
            control = self.state_averager.schedule_step(
                gather=next_round, timeout=self.averaging_timeout
            )
        began = time.perf_counter()
        control.add_done_callback(partial(self._emit_state_round, next_round, began))
        return control

    # -- state -------------------------------------------------------------------------------

    def load_state_from_peers(self, **kwargs: Any) -> None:
        """Take over the newest state of the swarm; keep one's own if no peer can give it.

        hivemind retries for ever on errors.
        """
        self._leave_scheduled_rounds()
        self.state_averager.step(wait_for_delayed_updates=True)
        began, round_before = time.perf_counter(), self.local_epoch
        kwargs.setdefault("timeout", self.load_state_timeout)
        with self.tracker.pause_updates():
            for _ in range(self._load_state_attempts):
                try:
                    self.state_averager.load_state_from_peers(**kwargs)
                    if self.grad_averager is not None:
                        self.grad_averager.load_state_from_peers(**kwargs)
                    break
                except Exception as error:
                    logger.warning(f"could not load the state from a peer: {error!r}")
            if self.tracker.global_epoch - 1 <= self.local_epoch < self.tracker.global_epoch:
                self.state_averager.local_epoch = self.tracker.global_epoch
            self.tracker.report_local_progress(self.local_epoch, samples_accumulated=0)
            if not self.client_mode:
                self.state_averager.state_sharing_priority = self.local_epoch
            if self.use_gradient_averaging:
                self.grad_averager.reset_accumulated_grads_()
                if not self.client_mode:
                    self.grad_averager.state_sharing_priority = self.local_epoch
        self._emit(
            "state_loaded",
            round_before=round_before,
            round=self.local_epoch,
            seconds=time.perf_counter() - began,
        )

    def _leave_scheduled_rounds(self) -> None:
        """Give up rounds that the swarm has left behind, without keeping a group waiting."""
        for control in (self.scheduled_grads, self.scheduled_state):
            if control is None or control.done():
                continue
            if control.stage == AveragingStage.LOOKING_FOR_GROUP:
                control.cancel()
            else:
                self._tag_along_with_zero_weight(control)
        self.scheduled_grads = self.scheduled_state = None
