"""Offsets between the clocks of nodes, bounded by the order of events on different nodes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

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
    Round,
    StateRound,
    TrainingStarted,
)
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


def clocks_of(timeline: Timeline) -> Clocks:
    """Estimate the offsets of the nodes' clocks in a replicate.

    An event that causes another one comes before it. If the first is stamped t on node a and the
    second u on node b, the offsets obey ``offset(a) - offset(b) <= t' - u'`` for the later stamp
    t' and the earlier u'. Such pairs are:

    * the supervisor's ``peer_spawned`` and a peer's ``dht_ready``;
    * a peer's ``peer_ready`` and the release of the barrier, and that and ``training_started``;
    * a peer's ``peer_finished`` and the outcome;
    * in a complete averaging, the moment at which a member began to wait for it and the end for
      every other member: nobody has the average before all have joined.

    The shortest paths over these differences bound each offset from both sides (a system of
    difference constraints, as in Bellman 1958). If all clocks can be equal, they count as equal.
    Otherwise the estimate is the middle of the bounds, which obeys all of them.

    Bounds that contradict each other, by less than events are late, are all widened by the same
    slack, doubled until they agree.

    Args:
        timeline: Events of the replicate.
    """
    from scipy.sparse.csgraph import NegativeCycleError, csgraph_from_dense, floyd_warshall

    nodes = {event.peer or "": event.node for event in timeline.of(PeerSpawned)}
    names = [SUPERVISOR, *dict.fromkeys(nodes.values())]
    place = {name: at for at, name in enumerate(names)}
    bounds = [[math.inf] * len(names) for _ in names]
    for late, early, difference in _bounds(timeline, nodes):
        row, column = place[late], place[early]
        if row != column:
            bounds[row][column] = min(bounds[row][column], difference)
    slack = 0.0
    while True:
        widened = [[value + slack for value in row] for row in bounds]
        graph = csgraph_from_dense(widened, null_value=math.inf)
        try:
            closed = floyd_warshall(graph)
            break
        except NegativeCycleError:
            slack = max(_SLACK_S, 2 * slack)
    equal = all(value >= 0 for row in widened for value in row)
    offsets = {}
    for name in names[1:]:
        low, high = -float(closed[0][place[name]]), float(closed[place[name]][0])
        known = math.isfinite(low) and math.isfinite(high)
        middle = (low + high) / 2 if known and not equal else 0.0
        offsets[name] = Offset(low, high, middle)
    return Clocks(offsets, nodes, slack)


def _bounds(timeline: Timeline, nodes: Mapping[str, str]) -> Iterator[tuple[str, str, float]]:
    """Yield nodes a and b with an upper bound of the offset of a less that of b [s]."""
    released = timeline.first(BarrierReleased)
    spawned = {event.peer: event.t for event in timeline.of(PeerSpawned)}
    ends = [*timeline.of(OutcomeFound), *timeline.of(ReplicateFinished)]
    for peer, node in nodes.items():
        for ready in timeline.of(DHTReady, peer):
            yield node, SUPERVISOR, ready.t - spawned[peer]
        if released is not None and not timeline.incarnations[peer].joined(
            timeline.spec.swarm.peers
        ):
            for started in timeline.of(TrainingStarted, peer):
                yield node, SUPERVISOR, started.t - released.t
            for waiting in timeline.of(PeerReady, peer):
                yield SUPERVISOR, node, released.t - waiting.t
        for finished in timeline.of(PeerFinished, peer):
            for end in ends:
                yield SUPERVISOR, node, end.t - finished.t
    yield from _meetings(timeline.of(StateRound), nodes)
    if timeline.spec.configuration.delay not in _IN_BACKGROUND:
        yield from _meetings(timeline.of(Round), nodes)


def _meetings(
    events: Iterable[Round] | Iterable[StateRound], nodes: Mapping[str, str]
) -> Iterator[tuple[str, str, float]]:
    groups: dict[tuple[object, ...], list[Round | StateRound]] = defaultdict(list)
    for event in events:
        complete = event.outcome == "averaged" and not event.retries and event.waited_s is not None
        if complete and event.peer in nodes and event.group is not None:
            groups[(event.round, *sorted(event.group))].append(event)
    for members in groups.values():
        for late in members:
            for early in members:
                began = early.t - (early.waited_s or 0.0)
                yield nodes[late.peer or ""], nodes[early.peer or ""], late.t - began
