"""Rounds of parameter averaging, and the wait for background work."""

from __future__ import annotations

import math
import threading
import time
from concurrent import futures
from dataclasses import dataclass, field
from functools import partial

from hivemind.averaging.control import StepControl
from hivemind.utils import get_logger

from rayhive.averaging.group_formation import NoOtherPeers
from rayhive.averaging.payload_policy import STALE_WEIGHT
from rayhive.averaging.round_filter import ExcludedRoundFailed
from rayhive.averaging.round_result import round_fields
from rayhive.averaging.state_averager import RayhiveStateAverager
from rayhive.errors import PeerError
from rayhive.membership.progress_tracker import LiveProgressTracker
from rayhive.optim.consistency import ParameterConsistency
from rayhive.optim.partition_history import PartitionHistory
from rayhive.optim.reporter import EventReporter
from rayhive.optim.state_sync import StateSync
from rayhive.optim.watchdog import ProcessWatchdog

logger = get_logger(__name__)

#: Factor between the longest wait for background work and the longest time of a step.
BACKGROUND_WAITS = 4
#: Longest wait for the callback of a finished parameter averaging [s].
CALLBACK_S = 1.0
#: Longest wait for background work after its averaging was cancelled [s].
CANCELLED_S = 1.0


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(frozen=True)
class ParameterRounds:
    """Averages parameters after a round, if it is their turn or a peer asks for it.

    Attributes:
        averager: The state averager.
        tracker: The peer's announcements, and the progress of the swarm.
        consistency: Whether the peer's parameters count, and whether they need averaging.
        partitions: Ends when the parameters of all sides are averaged.
        state_sync: Source of the values that a group gathers.
        reporter: Destination of events.
        watchdog: Ends a wait for a process that died.
        timeout: Longest time from the start of a round to its result [s].
        averaging_timeout: Longest time of one averaging [s].
        every: Rounds between two averagings of parameters.
        reported: Set when the outcome of the last averaging is recorded.
    """

    averager: RayhiveStateAverager
    tracker: LiveProgressTracker
    consistency: ParameterConsistency
    partitions: PartitionHistory
    state_sync: StateSync
    reporter: EventReporter
    watchdog: ProcessWatchdog
    timeout: float
    averaging_timeout: float
    every: int
    reported: threading.Event = field(default_factory=_set_event)

    def begin(self, round_: int) -> StepControl | None:
        """Begin to average the parameters of a round.

        Returns:
            The averaging, which waits for its trigger; None if there is none in this round.
        """
        requested = self.consistency.take_request()
        due = (
            self.tracker.swarm.live_peers > 1
            and (requested or round_ % self.every == 0)
            and not self.averager.averaging_in_progress
        )
        if not due:
            self.tracker.has_ended("synchronised", round_, met=False, aloud=False)
            return None
        try:
            control = self.averager.schedule_step(
                gather=self.state_sync.gathered(round_), timeout=self.timeout
            )
        except Exception as error:  # the averager may have been stopped for a while
            self.watchdog.check()
            logger.warning(f"could not begin to average parameters: {error!r}")
            self.consistency.note_failure(round_)
            self.tracker.has_ended("synchronised", round_, met=False)
            return None
        if self.consistency.stale:
            control.weight = STALE_WEIGHT
        self.reported.clear()
        control.add_done_callback(partial(self._end, round_, time.perf_counter()))
        return control

    def _end(self, round_: int, began: float, control: StepControl) -> None:
        """Record the outcome of an averaging."""
        try:
            complete = self._report(round_, began, control)
            if complete:
                self.consistency.note_averaged(round_)
                group = {peer.to_bytes() for peer in control.result()}
                self.partitions.note_averaged(group, self.tracker.swarm.any_alive)
            self.tracker.has_ended("synchronised", round_, met=complete, aloud=not complete)
        finally:
            self.reported.set()

    def _report(self, round_: int, began: float, control: StepControl) -> bool:
        """Report the outcome of an averaging; return whether it was complete."""
        seconds = time.perf_counter() - began
        cancelled = control.cancelled()
        error = None if cancelled else control.exception()
        if isinstance(error, NoOtherPeers):
            return False
        self.consistency.diverged |= isinstance(error, ExcludedRoundFailed)
        self.reporter.refusals(round_, error, "parameters")
        if cancelled or error is not None:
            self.reporter.emit(
                "state_round", round=round_, outcome="failed", group_size=0, fraction=0.0,
                sent_bytes=0, received_bytes=0, averaging_s=seconds,
            )  # fmt: skip
            return False
        result = control.result()
        self.reporter.refusals(round_, result, "parameters")
        self.consistency.diverged |= getattr(result, "excluded", False)
        fields = round_fields(result, seconds)
        outcome = "averaged" if fields["fraction"] >= 1.0 else "partial"
        self.reporter.emit("state_round", round=round_, outcome=outcome, **fields)
        return outcome == "averaged"

    def finish_background(self) -> None:
        """Wait for background work, whose buffers the next round would overwrite.

        hivemind waits for the time of one averaging; a round has two.

        Raises:
            PeerError: The work does not end, or a process of the peer died.
        """
        for _ in range(BACKGROUND_WAITS * math.ceil(self.timeout / self.averaging_timeout)):
            self.averager.step(wait_for_delayed_updates=True)
            if not self.averager.pending_updates:
                # without the outcome, the next round would ask for parameters that are here
                self.reported.wait(CALLBACK_S)
                return
            self.watchdog.check()
        raise PeerError("what runs in the background does not end")

    def end(self, patience: float) -> None:
        """Apply background work that ends soon, and cancel the rest.

        Args:
            patience: Longest wait for its end [s].
        """
        pending = futures.wait(set(self.averager.pending_updates), patience).not_done
        if pending:
            logger.warning(f"an averaging has not ended after {patience:.0f} s; cancelling it")
            self.watchdog.interrupt()
            pending = futures.wait(pending, CANCELLED_S).not_done
            self.watchdog.resume()
        if not pending:
            self.averager.step(wait_for_delayed_updates=True)
