"""Invariant ``survivors_progress``: peers without a fault keep finishing rounds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate, pairwise
from statistics import median

from rayhive.events import PeerFinished, TrainingStarted, Transition
from rayhive.invariants.base import Invariant, joins
from rayhive.timeline import Timeline

#: Number of median rounds that the bound allows on top of one averaging.
ROUNDS = 3


class SurvivorsProgress(Invariant):
    """Every peer without a fault finishes its next round within a bound.

    The bound is the time limit of one averaging, ``matchmaking_time + averaging_timeout``, plus
    three times the median round before the first fault. Time of evaluations is left out. For the
    target of a fault, the time begins at the heal.
    """

    about = "Every peer without a fault finishes a round within a bound."
    of_swarm = True

    def check(self, log: Timeline) -> list[str]:
        """Return every gap between two transitions that is longer than the bound."""
        swarm = log.spec.swarm
        bound = swarm.matchmaking_time + swarm.averaging_timeout + ROUNDS * _normal_s(log)
        wrong, faults = [], _faults(log)
        for name in log.trained:
            fired, healed = faults.get(name, ([], []))
            for (begin, clock), (end, end_clock) in pairwise(_moments(log, name)):
                self.checked += 1
                before = bisect_left(fired, end)
                gap = end - (max(begin, min(healed[before - 1], end)) if before else begin)
                if clock is not None and end_clock is not None:
                    gap -= max(0.0, end - begin - (end_clock - clock))
                if gap > bound:
                    wrong.append(f"{name}: no round for {gap:.1f} s, at most {bound:.1f} s")
        return wrong


def _moments(log: Timeline, name: str) -> list[tuple[float, float | None]]:
    """Return when an incarnation began to train, finished each round, and ended.

    Returns:
        Unix time [s], and the incarnation's training clock [s], which stops during evaluations;
        None where the log does not have it.
    """
    found: list[tuple[float, float | None]] = [(e.t, 0.0) for e in log.of(TrainingStarted, name)]
    found += [(event.t, event.clock_s) for event in log.of(Transition, name)]
    end = log.incarnations[name].end
    last = max(found[-1][0], log.end if end is None else end.t)
    return [*found, (last, end.clock_s if isinstance(end, PeerFinished) else None)]


def _normal_s(log: Timeline) -> float:
    first = min((fault.fired for fault in log.faults), default=log.end)
    gaps = [
        end - begin
        for name in log.trained
        for begin, end in pairwise(event.t for event in log.of(Transition, name))
        if end <= first
    ]
    return median(gaps) if gaps else 0.0


def _faults(log: Timeline) -> dict[str, tuple[list[float], list[float]]]:
    """Return the faults on each incarnation, in the order of time.

    Returns:
        Name -> when each fault fired, and the last heal of the faults up to it; inf if one of
        them was not healed [s, Unix time].
    """
    windows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for fault in log.faults:
        for name in () if joins(fault) else fault.targets:
            windows[name].append((fault.fired, fault.healed or math.inf))
    found = {}
    for name, own in windows.items():
        own.sort()
        found[name] = [t for t, _ in own], list(accumulate((t for _, t in own), max))
    return found
