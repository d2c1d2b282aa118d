"""Invariant ``survivors_progress``: peers without a fault keep finishing rounds."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from rayhive.events import TrainingStarted, Transition
from rayhive.invariants.base import Invariant
from rayhive.timeline import Timeline

#: Number of median rounds that the bound allows on top of one averaging.
ROUNDS = 3


class SurvivorsProgress(Invariant):
    """Every peer without a fault finishes its next round within a bound.

    The bound is the time limit of one averaging, ``matchmaking_time + averaging_timeout``, plus
    three times the median round before the first fault. For the target of a fault, the time begins
    at the heal.
    """

    about = "Every peer without a fault finishes a round within a bound."

    def check(self, log: Timeline) -> list[str]:
        """Return every gap between two transitions that is longer than the bound."""
        swarm = log.spec.swarm
        bound = swarm.matchmaking_time + swarm.averaging_timeout + ROUNDS * _normal_s(log)
        wrong = []
        for name in log.trained:
            kinds = TrainingStarted, Transition
            steps = [event.t for kind in kinds for event in log.of(kind, name)]
            last = log.incarnations[name].ended or log.end
            for begin, end in pairwise([*steps, max(steps[-1], last)]):
                self.checked += 1
                gap = end - _released(log, name, begin, end)
                if gap > bound:
                    wrong.append(f"{name}: no round for {gap:.1f} s, at most {bound:.1f} s")
        return wrong


def _normal_s(log: Timeline) -> float:
    first = min((fault.fired for fault in log.faults), default=log.end)
    gaps = [
        end - begin
        for name in log.trained
        for begin, end in pairwise(event.t for event in log.of(Transition, name))
        if end <= first
    ]
    return median(gaps) if gaps else 0.0


def _released(log: Timeline, name: str, begin: float, end: float) -> float:
    """Return the end of the last fault on an incarnation in a window without a round."""
    targeting = (fault for fault in log.faults if name in fault.targets and fault.fired < end)
    return max([begin, *(min(fault.healed or end, end) for fault in targeting)])
