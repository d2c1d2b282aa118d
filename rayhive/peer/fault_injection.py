"""Executor of the faults that a peer's training process commits itself, in the planned rounds.

A fault kind owns its act (:meth:`rayhive.faults.in_training.InTraining.act`). The executor calls it
just before the accumulated gradients enter the round's all-reduce, and sends its measurements as a
``sabotaged`` event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayhive.averaging.gradient_averager import accumulated
from rayhive.events import FaultActed
from rayhive.faults.in_training import InTraining, Tensors, compare
from rayhive.registry import FAULTS
from rayhive.spec.fault_plan import PlannedFault
from rayhive.strategy.dht import SkewedClock

Change = Callable[[Tensors], Tensors]


class FaultInjection:
    """The in-training faults of one peer.

    It is the :class:`~rayhive.faults.in_training.TrainingPeer` on which a fault acts. It has to be
    made before the peer forks, because it replaces the DHT's clock if a fault sets that.

    Args:
        faults: Faults planned for the peer; other than in-training kinds are left out.
        emit: Receives the peer's events.
        seconds: Returns the time since training started [s].

    Attributes:
        gradients: Accumulated gradients of the present round, one tensor a parameter.
    """

    def __init__(
        self,
        faults: Sequence[PlannedFault],
        emit: Callable[[FaultActed], None],
        seconds: Callable[[], float],
    ) -> None:
        self._emit, self._seconds, self._clock = emit, seconds, SkewedClock()
        self._faults: list[InTraining] = [
            FAULTS.get(fault.kind)(fault) for fault in faults if FAULTS.get(fault.kind).in_training
        ]
        if any(fault.skews_clock for fault in self._faults):
            self._clock.install()
        self._times = {fault.planned.id: 0 for fault in self._faults}
        history = max((fault.history for fault in self._faults), default=0)
        self._past: deque[tuple[int, Tensors]] = deque(maxlen=history)
        self._acting: InTraining | None = None
        self._served: tuple[InTraining, Change] | None = None
        self.gradients: Tensors = ()
        self._scale = 1.0

    def attach(self, optimizer: Any) -> None:
        """Hook into the peer's optimizer; without faults, do nothing."""
        if self._faults:
            optimizer.before_round = self.before_round
            optimizer.state_averager.on_serving = self.serving

    @torch.no_grad()
    def before_round(self, round_: int, averager: Any) -> None:
        """Execute the faults that are due in a round whose gradients are accumulated."""
        self.gradients, self._scale = accumulated(averager)
        due = [fault for fault in self._faults if self._is_due(fault, round_)]
        kept = [grad * self._scale for grad in self.gradients] if self._past.maxlen else []
        for self._acting in due:
            what = self._acting.act(self)
            if what is not None:
                self._times[self._acting.planned.id] += 1
                self._report(self._acting, round_, **what)
        if kept:
            self._past.append((round_, kept))

    def _is_due(self, fault: InTraining, round_: int) -> bool:
        at = fault.planned.at
        if self._times[fault.planned.id] >= fault.rounds:
            return False
        if at.round is not None:
            return round_ >= at.round
        return self._seconds() >= (at.seconds or 0.0)

    @torch.no_grad()
    def serving(self, tensors: Tensors) -> Tensors:
        """Return the tensors that a joiner gets in place of the peer's state."""
        if self._served is None:
            return tensors
        fault, change = self._served
        served = change(tensors)
        self._report(fault, None, served=True, **compare(tensors, served))
        return served

    def _report(self, fault: InTraining, round_: int | None, **what: Any) -> None:
        planned = fault.planned
        self._emit(FaultActed(fault=planned.id, round=round_, what={"act": planned.kind, **what}))

    # -- the peer, as the acting fault sees it -----------------------------------------------------

    def past_gradients(self, age: int) -> tuple[int, Tensors] | None:
        """Return the gradients of ``age`` rounds ago, or the oldest ones, and their round."""
        age = min(age, len(self._past))
        if not age:
            return None
        round_, means = self._past[-age]
        return round_, [mean / (self._scale or 1.0) for mean in means]

    def skew_clock(self, seconds: float) -> dict[str, float]:
        """Set the offset of the peer's DHT clock; return the offset before and after [s]."""
        return self._clock.set(seconds)

    def change_served_state(self, change: Change) -> None:
        """Pass served states through ``change``; the last fault that does so counts."""
        assert self._acting is not None
        self._served = self._acting, change
