"""Offsets between the clocks of nodes, bounded by the order of events on different nodes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayhive.events import (
    BarrierReleased,
    DHTReady,
    Event,
    OutcomeFound,
    PeerFinished,
    PeerLost,
    PeerReady,
    PeerSpawned,
    ReplicateFinished,
    ReplicateStarted,
    Round,
    StateRound,
    TrainingStarted,
)
from rayhive.spec.pruning import PRUNED
from rayhive.timeline import Timeline

#: Name of the supervisor's clock, which is the reference.
SUPERVISOR = "supervisor"
#: Events about a peer that the supervisor stamps.
_OF_SUPERVISOR = (PeerSpawned, PeerLost)
#: Delays with which gradients are averaged while the trainer does not wait: such a round says
#: nothing about the order of events.
_IN_BACKGROUND = ("optimizer", "gradients")
#: First slack that is tried if the bounds contradict each other [s].
_SLACK_S = 0.001


@dataclass(frozen=True)
class Offset:
    """Offset of a node's clock from that of the supervisor.

    Attributes:
        low: Least offset that the order of events allows [s].
        high: Largest such offset [s].
        seconds: Estimate: the time on the node's clock less the time on the supervisor's [s].
    """

    low: float
    high: float
    seconds: float

    @property
    def error_s(self) -> float:
        """Largest error of the estimate that the order of events allows [s]; may be infinite."""
        return max(self.high - self.seconds, self.seconds - self.low)


@dataclass(frozen=True)
class Clocks:
    """Clocks of the nodes of a replicate.

    Attributes:
        offsets: Ray's id of a node -> offset of its clock.
        nodes: Name of an incarnation -> Ray's id of its node.
        slack_s: Smallest of some slacks that every bound needed so that none contradict [s].
    """

    offsets: Mapping[str, Offset]
    nodes: Mapping[str, str]
    slack_s: float = 0.0

    @property
    def corrected(self) -> bool:
        """Whether any clock is corrected."""
        return any(offset.seconds for offset in self.offsets.values())

    def time(self, event: Event) -> float:
        """Return the time of an event on the clock of the supervisor [s, Unix time]."""
        return event.t - self.offset(event)

    def offset(self, event: Event) -> float:
        """Return the offset of the clock that an event was stamped with [s]."""
        if event.peer is None or isinstance(event, _OF_SUPERVISOR):
            return 0.0
        found = self.offsets.get(self.nodes.get(event.peer, ""))
        return 0.0 if found is None else found.seconds


def on_one_clock(timeline: Timeline) -> Timeline:
    """Return the timeline with all times on the clock of the supervisor.

    The result has the :class:`Clocks` that it was made with as ``clocks``. Its events are those of
    ``timeline`` if no clock is corrected.
    """
    clocks = clocks_of(timeline)
    shifted = timeline.events
    if clocks.corrected:
        shifted = tuple(
            event.model_copy(update={"t": clocks.time(event)}) if clocks.offset(event) else event
            for event in timeline.events
        )
    return Timeline(timeline.spec, shifted, timeline.log, clocks)


def clocks_of(timeline: Timeline) -> Clocks:
    """Estimate the offsets of the nodes' clocks in a replicate.

    Nodes with the same ``boot`` have one clock, that of their kernel. An event that causes another
    one comes before it. If the first is stamped t on node a and the second u on node b, the offsets
    obey ``offset(a) - offset(b) <= t' - u'`` for the later stamp t' and the earlier u'. Such pairs
    are:

    * the supervisor's ``peer_spawned`` and a peer's ``dht_ready``, which waits for a command;
    * a peer's ``peer_ready`` and the release of the barrier, and that and ``training_started``;
    * a peer's ``peer_finished`` and the end of the replicate;
    * in a complete averaging, the moment at which a member began to wait for it and the end for
      every other member: nobody has the average before all have joined.

    The shortest paths over these differences bound each offset from both sides (a system of
    difference constraints, as in Bellman 1958). If all clocks can be equal, they count as equal.
    Otherwise the estimate is the middle of the bounds, which obeys all of them; with one bound, the
    allowed offset that is closest to 0.

    Bounds that contradict each other, by less than events are late, are all widened by the same
    slack, doubled until they agree.

    Args:
        timeline: Events of the replicate.
    """
    spawned = timeline.of(PeerSpawned)
    nodes = {event.peer or "": event.node for event in spawned}
    clock = _clock_names(timeline)
    names = [SUPERVISOR, *dict.fromkeys(name for name in clock.values() if name != SUPERVISOR)]
    if len(names) == 1:
        return Clocks({node: Offset(0.0, 0.0, 0.0) for node in clock}, nodes)
    place = {name: at for at, name in enumerate(names)}
    bounds = _bounds(timeline, {peer: place[clock[node]] for peer, node in nodes.items()})
    closed, slack, equal = _closed(bounds)
    found = [Offset(0.0, 0.0, 0.0)]
    for at in range(1, len(names)):
        low, high = -float(closed[0, at]), float(closed[at, 0])
        known = math.isfinite(low) and math.isfinite(high)
        middle = (low + high) / 2 if known else min(max(0.0, low), high)
        found.append(Offset(low, high, 0.0 if equal else middle))
    return Clocks({node: found[place[name]] for node, name in clock.items()}, nodes, slack)


def _clock_names(timeline: Timeline) -> dict[str, str]:
    """Return the name of each node's clock."""
    started = timeline.first(ReplicateStarted)
    home = None if started is None else started.boot
    return {
        event.node: event.node
        if event.boot is None
        else SUPERVISOR
        if event.boot == home
        else event.boot
        for event in timeline.of(PeerSpawned)
    }


def _closed(bounds: Any) -> tuple[Any, float, bool]:
    """Return the tightest bounds, the slack, and whether all clocks can be equal.

    Args:
        bounds: Upper bounds of the offset of the row less that of the column [s]; changed.
    """
    from scipy.sparse.csgraph import NegativeCycleError, csgraph_from_dense, floyd_warshall

    np.fill_diagonal(bounds, np.inf)
    slack = 0.0
    while True:
        try:
            graph = csgraph_from_dense(bounds + slack, null_value=np.inf)
            return floyd_warshall(graph), slack, bool((bounds + slack >= 0).all())
        except NegativeCycleError:
            slack = max(_SLACK_S, 2 * slack)


def _bounds(timeline: Timeline, place: Mapping[str, int]) -> Any:
    """Return upper bounds of the offset of one clock (row) less that of another (column) [s].

    Args:
        timeline: Events of the replicate.
        place: Name of an incarnation -> number of its clock; the supervisor's is 0.
    """
    size = max(place.values(), default=0) + 1
    bounds = np.full((size, size), np.inf)
    for peer, at in place.items():
        for row, column, difference in _with_supervisor(timeline, peer, at):
            bounds[row, column] = min(bounds[row, column], difference)
    _meet(bounds, timeline.of(StateRound), place)
    if timeline.spec.configuration.delay not in _IN_BACKGROUND:
        _meet(bounds, timeline.of(Round), place)
    return bounds


def _with_supervisor(timeline: Timeline, peer: str, at: int) -> Iterator[tuple[int, int, float]]:
    """Yield the bounds between the clock of a peer and that of the supervisor."""
    for spawned in timeline.of(PeerSpawned, peer):
        for ready in timeline.of(DHTReady, peer):
            yield at, 0, ready.t - spawned.t
    released = timeline.first(BarrierReleased)
    late = timeline.incarnations[peer].joined(timeline.spec.swarm.peers)
    if released is not None and not late:
        for started in timeline.of(TrainingStarted, peer):
            yield at, 0, started.t - released.t
        for waiting in timeline.of(PeerReady, peer):
            yield 0, at, released.t - waiting.t
    # these peers are asked to stop when the outcome is known
    early = ("failed", PRUNED)
    outcomes = (end for end in timeline.of(OutcomeFound) if end.state not in early)
    for end in (*outcomes, *timeline.of(ReplicateFinished)):
        for finished in timeline.of(PeerFinished, peer):
            yield 0, at, end.t - finished.t


def _meet(
    bounds: Any, events: Iterable[Round] | Iterable[StateRound], place: Mapping[str, int]
) -> None:
    """Tighten the bounds by the averagings that were complete."""
    groups: dict[tuple[object, ...], list[Round | StateRound]] = defaultdict(list)
    for event in events:
        complete = event.outcome == "averaged" and not event.retries and event.waited_s is not None
        if complete and event.peer in place and event.group is not None:
            groups[(event.round, *sorted(event.group))].append(event)
    for members in groups.values():
        at = np.array([place[event.peer or ""] for event in members])
        ends = np.full(len(bounds), np.inf)
        begins = np.full(len(bounds), -np.inf)
        np.minimum.at(ends, at, [event.t for event in members])
        np.maximum.at(begins, at, [event.t - (event.waited_s or 0.0) for event in members])
        where = np.ix_(at, at)
        bounds[where] = np.minimum(bounds[where], ends[at][:, None] - begins[at][None, :])
