"""Live capacity: the peers that could take part in training, over time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import accumulate

from rayhive.events import APART, PeerFinished
from rayhive.timeline import FaultWindow, Timeline

Window = tuple[float, float]


def fault_windows(
    timeline: Timeline,
    effects: Collection[str],
    without: str | None = None,
    faults: Iterable[FaultWindow] | None = None,
) -> dict[str, list[Window]]:
    """Return the times during which each peer was under a fault with one of the effects.

    A window lasts from ``fault_fired`` to ``fault_healed``, or to the end of training.

    Args:
        timeline: The replicate.
        effects: The effects.
        without: Id of a fault to leave out.
        faults: The faults; by default those of the replicate, from ``fault_fired`` on.

    Returns:
        Name of the peer to its windows [s, Unix time].
    """
    end = float("inf") if timeline.span is None else timeline.span[1]
    windows: dict[str, list[Window]] = defaultdict(list)
    for fault in timeline.faults if faults is None else faults:
        counts = fault.effect in effects and fault.fault != without
        for peer in fault.targets if counts else ():
            windows[peer].append((fault.fired, end if fault.healed is None else fault.healed))
    return dict(windows)


def overlap(window: Window, covers: Iterable[Window]) -> float:
    """Return the seconds of a window that the union of ``covers`` contains."""
    covered, reached = 0.0, window[0]
    for begin, end in sorted(covers):
        begin, end = max(begin, reached), min(end, window[1])
        if end > begin:
            covered += end - begin
            reached = end
    return covered


class Windows:
    """Windows of time, for many queries of :func:`overlap` in ``O(log n)`` each.

    Args:
        windows: The windows, in any order.
    """

    def __init__(self, windows: Iterable[Window]) -> None:
        self._windows = sorted(windows)
        self._begins = [begin for begin, _ in self._windows]
        self._reached = list(accumulate((end for _, end in self._windows), max))

    def overlap(self, window: Window) -> float:
        """Return the seconds of ``window`` that the union of the windows contains."""
        first = bisect_right(self._reached, window[0])  # all before have ended
        last = bisect_left(self._begins, window[1])
        return overlap(window, self._windows[first:last])

    def contain(self, moment: float) -> bool:
        """Return whether a moment is in one of the windows, ends included."""
        begun = bisect_right(self._begins, moment)
        return begun > 0 and self._reached[begun - 1] >= moment


class Capacity:
    """Live peers as a function of time.

    A peer that is stopped (``pause``) or cut off (``partition``) does not count during the fault,
    whatever its own process does. One that holds its node and does not train never counts.

    Args:
        timeline: The replicate.
        from_start: Count a peer that joined later from the start of its training; otherwise from
            the start of its process, when its node begins to cost.
    """

    def __init__(self, timeline: Timeline, from_start: bool) -> None:
        away = fault_windows(timeline, APART)
        self._away = {name: Windows(windows) for name, windows in away.items()}
        self._present: list[tuple[str, Window]] = []
        self._moments: list[float] = []
        self._between: list[frozenset[int]] = []
        if timeline.span is None:
            return
        begin, end = timeline.span
        for item in timeline.incarnations.values():
            came = item.started if from_start or item.spawned is None else item.spawned
            if came is None or item.name in timeline.holders:
                continue
            if not item.joined(timeline.spec.swarm.peers):
                came = begin
            gone = item.ended
            if gone is None or isinstance(item.end, PeerFinished):
                gone = end  # a peer that finished early was able to continue
            self._present.append((item.name, (max(came, begin), min(gone, end))))
        self._divide()

    def _divide(self) -> None:
        """Find the peers that are present between two arrivals or departures."""
        came: dict[float, set[int]] = defaultdict(set)
        gone: dict[float, set[int]] = defaultdict(set)
        for number, (_, window) in enumerate(self._present):
            if window[0] < window[1]:
                came[window[0]].add(number)
                gone[window[1]].add(number)
        self._moments = sorted(came.keys() | gone.keys())
        present: set[int] = set()
        for moment in self._moments:
            present = (present - gone.get(moment, set())) | came.get(moment, set())
            self._between.append(frozenset(present))

    def peer_seconds(self, begin: float, end: float) -> float:
        """Return the seconds of all live peers together between two Unix times."""
        total, away = 0.0, self._away
        first = max(0, bisect_right(self._moments, begin) - 1)
        last = bisect_left(self._moments, end)
        for number in sorted(frozenset[int]().union(*self._between[first:last])):
            name, (came, gone) = self._present[number]
            window = (max(begin, came), min(end, gone))
            if window[1] > window[0]:
                total += window[1] - window[0] - (away[name].overlap(window) if name in away else 0)
        return total

    def is_away(self, peer: str, moment: float) -> bool:
        """Return whether a fault had stopped a peer or cut it off at a Unix time."""
        return peer in self._away and self._away[peer].contain(moment)

    def present(self, moment: float) -> frozenset[str]:
        """Return the peers that existed at a Unix time, reachable or not."""
        at = bisect_right(self._moments, moment)
        return frozenset(self._present[n][0] for n in (self._between[at - 1] if at else ()))


def initial_trainers(timeline: Timeline) -> int:
    """Return the number of the peers that started together and train."""
    peers = timeline.spec.swarm.peers
    return peers - sum(not timeline.incarnations[name].joined(peers) for name in timeline.holders)


def live_share(timeline: Timeline) -> float | None:
    """Return the mean number of live peers during the training / the number that began.

    A peer counts from its ``peer_spawned`` (an initial peer from the beginning) to its loss,
    departure or failure, less the time during which a fault stopped it or cut it off. The share
    exceeds 1 if peers join. None if nothing was trained.
    """
    if timeline.span is None or timeline.span[0] == timeline.span[1]:
        return None
    begin, end = timeline.span
    seconds = Capacity(timeline, from_start=False).peer_seconds(begin, end)
    return seconds / ((end - begin) * initial_trainers(timeline))
