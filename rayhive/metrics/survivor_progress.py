"""Progress of a fault's survivors: their rounds without its targets, and their longest stall."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from rayhive.events import APART, GROUPED, DHTReady, PeerFinished, Round
from rayhive.metrics.live_capacity import Capacity, Windows, fault_windows
from rayhive.metrics.stats import Time
from rayhive.timeline import FaultWindow, Timeline

#: Whether a round is progress of a survivor.
Counts: TypeAlias = Callable[[Round], bool]
#: Effects of faults that remove the targets from the survivors' groups.
AWAY = APART | {"gone"}


class SurvivorProgress:
    """Rounds that survivors applied.

    Args:
        timeline: The replicate.
        capacity: Live peers of the replicate over time.
    """

    def __init__(self, timeline: Timeline, capacity: Capacity) -> None:
        reported = sorted(timeline.of(Round), key=lambda event: (event.t, event.peer or ""))
        self._reported = _Rounds(reported)
        applied = [event for event in reported if timeline.applied(event)]
        self._applied = _Rounds(applied)
        self._of_round: dict[int, list[Round]] = defaultdict(list)
        for event in applied:
            self._of_round[event.round].append(event)
        self._averaged = timeline.by_round(Round)
        self._own = {(e.peer, e.round): e for events in self._averaged.values() for e in events}
        self._ids = {event.peer: event.peer_id for event in timeline.of(DHTReady)}
        self._timeline = timeline
        self._capacity, apart = capacity, fault_windows(timeline, APART)
        self._apart = {name: Windows(windows) for name, windows in apart.items()}
        self._incarnations = timeline.incarnations
        self._end = 0.0 if timeline.span is None else timeline.span[1]

    def survivors(self, fault: FaultWindow) -> frozenset[str]:
        """Return the peers that trained then and are no targets; if all are targets, all peers."""
        present = self._capacity.present(fault.fired)
        return present - fault.targets or present

    def progress(self, fault: FaultWindow) -> Counts:
        """Return a test whether an applied round is a survivor's progress after a fault.

        A round counts as progress if the survivor's group contained none of the targets. Once a
        stopped or cut-off target is healed, every round counts. If the fault leaves its targets in
        the groups (effect ``none``), or all peers are targets, a round counts that is later than
        the last round which a target had reported when the fault fired.
        """
        survivors = self.survivors(fault)
        missing = fault.effect in AWAY and survivors.isdisjoint(fault.targets)
        last = max((self._reported.last(name, fault.fired) for name in fault.targets), default=0)

        def counts(event: Round) -> bool:
            if event.t <= fault.fired or event.peer not in survivors:
                return False
            if not missing:
                return event.round > last
            if fault.effect in APART and event.t > (fault.healed or self._end):
                return True
            return not self._had_target(event, fault.targets)

        return counts

    def reports(self, number: int) -> Sequence[Round]:
        """Return the reports of an applied round in the order of time."""
        return self._of_round.get(number, ())

    def first(self, fault: FaultWindow) -> float | None:
        """Return the time of the survivors' first progress after a fault; None without any."""
        counts = self.progress(fault)
        shown = (self._first(fault, name, counts) for name in self.survivors(fault))
        return min((moment for moment in shown if moment is not None), default=None)

    def last(self, fault: FaultWindow) -> float:
        """Return the time of the last round that a survivor applied; -inf without any."""
        return max(map(self._applied.end, self.survivors(fault)), default=-math.inf)

    def _first(self, fault: FaultWindow, name: str, counts: Counts) -> float | None:
        steps = self._applied.after(name, fault.fired)
        return next((event.t for event in steps if counts(event)), None)

    def _had_target(self, event: Round, targets: frozenset[str]) -> bool:
        """Return whether a peer's group of a round contained one of the targets.

        Logs of earlier versions record only the size of the group. Then a target is assumed to be
        in a group that is larger than the number of non-targets which report the same round with
        that size.
        """
        own = self._own.get((event.peer, event.round))
        if own is None or own.outcome not in GROUPED:
            return False
        if own.group is not None:
            return any(self._ids.get(name) in own.group for name in targets)
        reporting = {
            other.peer
            for other in self._averaged[event.round]
            if other.outcome in GROUPED and other.group_size == own.group_size
        }
        return (own.group_size or 0) > len(reporting - targets)

    def stall(self, fault: FaultWindow) -> Time | None:
        """Return the longest time that a survivor went without a round [s].

        The time of each survivor begins with the fault and lasts until its first progress without
        the targets and, if the fault was healed, until its first round after the heal. A survivor
        is left out if another fault stopped it or cut it off meanwhile, or if it was lost before
        its first progress. None if no survivor remains; censored if one had not reached the end of
        its time when training ended.
        """
        counts = self.progress(fault)
        found = [self._stall(fault, name, counts) for name in self.survivors(fault)]
        stalls = [stall for stall in found if stall is not None]
        if not stalls:
            return None
        longest = max(stall.seconds for stall in stalls)
        return Time(longest, any(stall.censored for stall in stalls))

    def _stall(self, fault: FaultWindow, name: str, counts: Counts) -> Time | None:
        """Return the longest time of one survivor."""
        survivor = self._incarnations[name]
        end = self._end if survivor.ended is None else min(survivor.ended, self._end)
        shown = self._first(fault, name, counts)
        until = end if shown is None else max(shown, fault.healed or shown)
        moments, ended = [fault.fired], False
        for event in self._applied.after(name, fault.fired):
            moments.append(event.t)
            if event.t >= until:
                ended = True
                break
        if not ended:
            moments.append(max(end, moments[-1]))
        apart = self._apart.get(name)
        if name in fault.targets:  # a survivor too, as all peers are targets
            others = fault_windows(self._timeline, APART, without=fault.fault)
            apart = Windows(others.get(name, ()))
        if apart is not None and apart.overlap((fault.fired, moments[-1])) > 0:
            return None
        if not ended and survivor.end is not None and not isinstance(survivor.end, PeerFinished):
            return None
        gaps = [after - before for before, after in pairwise(moments)]
        longest = max(gaps)
        return Time(longest, censored=not ended and (shown is None or gaps[-1] == longest))


class _Rounds:
    """Rounds of each peer by time, so that a search takes ``O(log n)``.

    Args:
        rounds: Rounds of all peers in the order of time.
    """

    def __init__(self, rounds: Sequence[Round]) -> None:
        self._rounds: dict[str, list[Round]] = defaultdict(list)
        for event in rounds:
            self._rounds[event.peer or ""].append(event)
        self._times = {name: [event.t for event in own] for name, own in self._rounds.items()}
        self._highest = {
            name: list(accumulate((event.round for event in own), max))
            for name, own in self._rounds.items()
        }

    def after(self, name: str, moment: float) -> Iterator[Round]:
        """Yield the rounds of a peer after a Unix time."""
        own = self._rounds.get(name, [])
        first = bisect_right(self._times.get(name, []), moment)
        return (own[at] for at in range(first, len(own)))

    def last(self, name: str, moment: float) -> int:
        """Return the highest round of a peer up to a Unix time; 0 before the first."""
        before = bisect_right(self._times.get(name, []), moment)
        return self._highest[name][before - 1] if before else 0

    def end(self, name: str) -> float:
        """Return the time of a peer's last round; -inf if it has none."""
        times = self._times.get(name)
        return times[-1] if times else -math.inf
