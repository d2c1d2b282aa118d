"""How much of the swarm there was to train with, over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rayhive.events import APART
from rayhive.metrics.timeline import Timeline

Window = tuple[float, float]


def fault_windows(timeline: Timeline, effects: Iterable[str]) -> dict[str, list[Window]]:
    """Return when each life was under a fault with one of these effects.

    From ``fault_fired`` to ``fault_healed``, or to the end of training.
    """
    healed = {event["fault"]: event["t"] for event in timeline.of("fault_healed")}
    end = float("inf") if timeline.span is None else timeline.span[1]
    windows: dict[str, list[Window]] = defaultdict(list)
    wanted = frozenset(effects)
    for fired in timeline.of("fault_fired"):
        if fired["effect"] in wanted:
            for life in fired.get("lives") or ():
                windows[life].append((fired["t"], healed.get(fired["fault"], end)))
    return dict(windows)


def overlap(window: Window, others: Iterable[Window]) -> float:
    """Return how many seconds of a window at least one of the others covers."""
    covered, reached = 0.0, window[0]
    for begin, end in sorted(others):
        begin, end = max(begin, reached), min(end, window[1])
        if end > begin:
            covered += end - begin
            reached = end
    return covered


class Capacity:
    """The peers that could take part, as functions of time.

    A peer that is stopped (``pause``) or cut off (``partition``) does not count while that lasts,
    whatever it does by itself.

    Args:
        timeline: The replicate.
        from_start: Count a peer that came later only from when it began to train; else from when
            its process ran, as whoever pays for its node does.
    """

    def __init__(self, timeline: Timeline, from_start: bool) -> None:
        self._away = fault_windows(timeline, APART)
        self._lives: dict[str, Window] = {}
        if timeline.span is None:
            return
        begin, end = timeline.span
        for life in timeline.lives.values():
            came = life.started if from_start or life.spawned is None else life.spawned
            if came is None:
                continue
            if not life.joined(timeline.spec.swarm.peers):
                came = begin
            gone = life.ended
            if gone is None or life.end == "peer_finished":
                gone = end  # whoever was done first could have gone on
            self._lives[life.name] = (max(came, begin), min(gone, end))

    def peer_seconds(self, begin: float, end: float) -> float:
        """Return the seconds of all peers together between two moments."""
        total = 0.0
        for name, (came, gone) in self._lives.items():
            window = (max(begin, came), min(end, gone))
            if window[1] > window[0]:
                total += window[1] - window[0] - overlap(window, self._away.get(name, ()))
        return total

    def present(self, moment: float) -> frozenset[str]:
        """Return the lives that were there at a moment, reachable or not."""
        return frozenset(
            name for name, (came, gone) in self._lives.items() if came <= moment < gone
        )


def live_share(timeline: Timeline) -> float | None:
    """Return the mean number of peers during the training / the number that began.

    A peer counts from its ``peer_spawned`` (those that started together: from the beginning) to
    its loss, goodbye or failure, less the time that it was stopped or cut off by a fault. It can
    exceed 1 where peers join. None where nothing was trained.
    """
    if timeline.span is None or timeline.span[0] == timeline.span[1]:
        return None
    begin, end = timeline.span
    seconds = Capacity(timeline, from_start=False).peer_seconds(begin, end)
    return seconds / ((end - begin) * timeline.spec.swarm.peers)
