"""Executor of the faults that a peer's training process commits itself, in the planned rounds.

A fault kind owns its act (:meth:`rayhive.faults.in_training.InTraining.act`). The executor calls it
just before the accumulated gradients enter the round's all-reduce, and sends its measurements as a
``sabotaged`` event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from rayhive.averaging.gradient_averager import accumulated
from rayhive.events import FaultActed
from rayhive.faults.in_training import InTraining, Tensors, changes_gradients, compare
from rayhive.registry import FAULTS
from rayhive.spec.fault_plan import PlannedFault
from rayhive.strategy.dht import SkewedClock


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
        scale: Factor that makes them means over samples.
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
        self._may_miss = False
        self._held: list[FaultActed] = []
        self.gradients: Tensors = ()
        self.scale = 1.0

    def attach(self, optimizer: Any) -> None:
        """Hook into the peer's optimizer; without faults, do nothing."""
        if self._faults:
            self._may_miss = optimizer.tracker.quorum
            optimizer.before_round = self.before_round
            optimizer.state_averager.on_serving = self.serving

    @torch.no_grad()
    def before_round(self, round_: int, averager: Any) -> Callable[[], None]:
        """Execute the faults that are due in a round whose gradients are accumulated.

        A second fault of the gradients waits for the next round.

        Returns:
            A function that undoes what this did to the gradients: they enter the next round if
            other peers average this one without the peer.
        """
        self._release()  # the round before counted
        self.gradients, self.scale = accumulated(averager)
        for fault in self._faults:
            fault.observe(self, round_)
        acted: InTraining | None = None
        before: Tensors = ()
        for fault in [fault for fault in self._faults if self._is_due(fault, round_)]:
            if not changes_gradients(type(fault)):
                self._act(fault, round_)
            elif acted is None:
                copies = [gradient.clone() for gradient in self.gradients]
                if self._act(fault, round_, held=self._may_miss):
                    acted, before = fault, copies
        return partial(self._undo, acted, before)

    def _act(self, fault: InTraining, round_: int, held: bool = False) -> bool:
        """Execute a fault; return False if it waits for the next round.

        Args:
            fault: The fault.
            round_: The round.
            held: Whether its report waits until it is known that the round counts.
        """
        what = fault.act(self)
        if what is None:
            return False
        self._times[fault.planned.id] += 1
        event = self._event(fault, round_, **what)
        if held:
            self._held.append(event)
        else:
            self._emit(event)
        return True

    def _release(self) -> None:
        held, self._held = self._held, []
        for event in held:
            self._emit(event)

    @torch.no_grad()
    def _undo(self, acted: InTraining | None, before: Tensors) -> None:
        """Have the fault that acted do so again, on the same gradients."""
        self._held = []
        for fault in self._faults:
            fault.forget()
        if acted is not None:
            self._times[acted.planned.id] -= 1
            for gradient, old in zip(self.gradients, before, strict=True):
                gradient.copy_(old)

    def _is_due(self, fault: InTraining, round_: int) -> bool:
        at = fault.planned.at
        if self._times[fault.planned.id] >= fault.rounds:
            return False
        if at.round is not None:
            return round_ >= at.round
        return self._seconds() >= (at.seconds or 0.0)

    @torch.no_grad()
    def serving(self, tensors: Tensors) -> Tensors:
        """Return the tensors that a joiner gets as the peer's state; the last fault counts."""
        for fault in reversed(self._faults):
            served = fault.serve(tensors)
            if served is not None:
                self._emit(self._event(fault, None, served=True, **compare(tensors, served)))
                return served
        return tensors

    def _event(self, fault: InTraining, round_: int | None, **what: Any) -> FaultActed:
        planned = fault.planned
        return FaultActed(fault=planned.id, round=round_, what={"act": planned.kind, **what})

    def skew_clock(self, seconds: float) -> dict[str, float]:
        """Set the offset of the peer's DHT clock; return the offset before and after [s]."""
        return self._clock.set(seconds)
