"""Rounds of parameter averaging."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from hivemind.averaging.control import StepControl
from hivemind.utils import get_logger

from rayhive.averaging.factory import takes_extras
from rayhive.averaging.gradient_extras import averageable
from rayhive.averaging.group_formation import NoOtherPeers
from rayhive.averaging.payload_policy import STALE_WEIGHT
from rayhive.averaging.round_filter import ExcludedRoundFailed
from rayhive.averaging.round_result import round_fields
from rayhive.events import AveragingReason, StateRound
from rayhive.optim.peer_state import PeerState
from rayhive.optim.state_sync import StateSync
from rayhive.spec import BLOCKWISE, Aggregation

logger = get_logger(__name__)


def period_of(
    every: int | Literal["auto"],
    aggregation: Aggregation,
    *,
    extra_tensors: Sequence[torch.Tensor] = (),
    grad_averager_factory: Any = None,
    **others: Any,
) -> tuple[int | None, list[torch.Tensor]]:
    """Return the rounds between two averagings of parameters, and what gradients take along.

    With ``auto``, extra tensors enter the rounds of gradients, and parameters are averaged only for
    a reason: a period of None. Averagers of the user's own do not take them, and centred clipping
    would mix up their differences with those of gradients. Then parameters and extra tensors are
    averaged in every round. Constants that are not finite, such as masks, are never averaged.

    Args:
        every: The period, or ``auto``.
        aggregation: How a reducer aggregates gradients.
        extra_tensors: Tensors besides parameters; each peer computes its own.
        grad_averager_factory: The user's factory of gradient averagers, if there is one.
        others: Arguments of the optimizer that do not matter here.
    """
    extras = [tensor for tensor in extra_tensors if averageable(tensor)]
    if every != "auto" or not extras:
        return (None if every == "auto" else every), []
    if takes_extras(grad_averager_factory) and aggregation not in BLOCKWISE:
        return None, extras
    own = "each peer computes its own extra tensors"
    logger.info(f"average_state_every: auto averages parameters in every round, because {own}")
    return 1, []


@dataclass(frozen=True)
class ParameterRounds:
    """Averages parameters after a round, if it is their turn or a peer asks for it.

    Attributes:
        peer: The peer.
        state_sync: Source of the values that a group gathers.
        every: Rounds between two averagings of parameters; None averages them only for a reason
            other than time.
    """

    peer: PeerState
    state_sync: StateSync
    every: int | None

    def begin(self, round_: int) -> StepControl | None:
        """Begin to average the parameters of a round.

        Returns:
            The averaging, which waits for its trigger; None if there is none in this round.
        """
        reason = self.peer.consistency.take_request()
        if reason is None and self.every is not None and round_ % self.every == 0:
            reason = "period"
        alone = self.peer.tracker.swarm.live_peers <= 1
        if reason is None or alone or self.peer.state_averager.averaging_in_progress:
            self.peer.tracker.has_ended("synchronised", round_, met=False, aloud=False)
            return None
        self.peer.tracker.pass_on_peers()
        try:
            control = self.peer.state_averager.schedule_step(
                gather=self.state_sync.gathered(round_), timeout=self.peer.round_timeout
            )
        except Exception as error:  # the averager may have been stopped for a while
            self.peer.watchdog.check()
            logger.warning(f"could not begin to average parameters: {error!r}")
            self.peer.consistency.note_failure(round_)
            self.peer.tracker.has_ended("synchronised", round_, met=False)
            return None
        if self.peer.consistency.stale:
            control.weight = STALE_WEIGHT
        self.peer.parameters_reported.clear()
        control.add_done_callback(partial(self._end, round_, reason, time.perf_counter()))
        return control

    def _end(
        self, round_: int, reason: AveragingReason, began: float, control: StepControl
    ) -> None:
        """Record the outcome of an averaging."""
        try:
            complete = self._report(round_, reason, began, control)
            if complete is None:
                complete = False
            elif not complete:
                self.peer.consistency.note_failure(round_)
            else:
                group = {peer.to_bytes() for peer in control.result()}
                trained = bool(group & self.peer.tracker.swarm.trained_peers())
                if trained or not self.peer.untrained:
                    self.peer.consistency.note_averaged(round_)
                if trained and self.peer.untrained:
                    self.peer.set_untrained(False)
                self.peer.partitions.note_averaged(group, self.peer.tracker.swarm.any_present)
            self.peer.tracker.has_ended("synchronised", round_, met=complete, aloud=not complete)
        finally:
            self.peer.parameters_reported.set()

    def _report(
        self, round_: int, reason: AveragingReason, began: float, control: StepControl
    ) -> bool | None:
        """Report the outcome of an averaging.

        Returns:
            Whether it was complete; None if there was no other peer.
        """
        seconds = time.perf_counter() - began
        cancelled = control.cancelled()
        error = None if cancelled else control.exception()
        if isinstance(error, NoOtherPeers):
            return None
        self.peer.consistency.diverged |= isinstance(error, ExcludedRoundFailed)
        self.peer.reporter.refusals(round_, error, "parameters")
        if cancelled or error is not None:
            failed: dict[str, Any] = {
                "reason": reason,
                "group_size": 0,
                "fraction": 0.0,
                "sent_bytes": 0,
                "received_bytes": 0,
            }
            self.peer.reporter.emit(
                StateRound(round=round_, outcome="failed", averaging_s=seconds, **failed)
            )
            return False
        result = control.result()
        self.peer.reporter.refusals(round_, result, "parameters")
        self.peer.consistency.diverged |= getattr(result, "excluded", False)
        fields = round_fields(result, seconds)
        complete: bool = fields["fraction"] >= 1.0
        outcome: Literal["averaged", "partial"] = "averaged" if complete else "partial"
        self.peer.reporter.emit(StateRound(round=round_, outcome=outcome, reason=reason, **fields))
        return complete
