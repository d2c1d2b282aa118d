"""Timeline of one replicate: its events by kind, peer and round, and along the training clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from rayhive.events import GROUPED, Event
from rayhive.metrics.incarnations import Incarnation, read_incarnations
from rayhive.spec.replicate import ReplicateSpec

#: Outcomes of a gradient round after which the optimizer stepped: the samples are committed.
APPLIED = frozenset({"averaged", "partial", "local", "alone"})
#: Kinds of events whose ``samples`` are all samples that the peer has computed so far.
_COUNTING = frozenset({"evaluation", "peer_finished"})
#: States of a finished replicate. Replicates in other states failed, with these exceptions:
FINISHED = frozenset({"completed", "timed_out"})
#: State of a replicate whose every attempt lost a part of the cluster.
LOST = "lost"
#: States of replicates that count neither as finished nor as failed.
UNCOUNTED = frozenset({"stopped", "unfinished"})


class Timeline:
    """Events of one attempt at a replicate.

    Events of different peers may be in any order; those of one peer are in the order of time.
    Round ``n`` is the ``n``-th of the swarm, from 1. Each incarnation of a replica is a peer of its
    own.

    Args:
        spec: Specification of the replicate.
        events: Its events.
        log: File with the events; None if there is none.
    """

    def __init__(
        self, spec: ReplicateSpec, events: Iterable[Event], log: Path | None = None
    ) -> None:
        self.spec = spec
        self.log = log
        self.events = tuple(events)
        self._by_kind: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            self._by_kind[event["kind"]].append(event)

    # -- selections ----------------------------------------------------------------------------

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind."""
        return self._by_kind.get(kind, [])

    def of_peer(self, name: str) -> list[Event]:
        """Return the events of one peer, including those written by its supervisor."""
        return self._by_name.get(name, [])

    @cached_property
    def _by_name(self) -> dict[str, list[Event]]:
        return group_by((event for event in self.events if event["peer"] is not None), "peer")

    def first(self, kind: str) -> Event | None:
        """Return the first event of a kind, or None."""
        return next(iter(self.of(kind)), None)

    def by_peer(self, kind: str) -> dict[str, list[Event]]:
        """Return the events of one kind by the name of the peer, names sorted."""
        return group_by(self.of(kind), "peer")

    def by_round(self, kind: str) -> dict[int, list[Event]]:
        """Return the events of one kind by round, rounds sorted."""
        return group_by(self.of(kind), "round")

    # -- end of the replicate ------------------------------------------------------------------

    @property
    def state(self) -> str:
        """State in ``replicate_finished``; ``unfinished`` without that event."""
        finished = self.of("replicate_finished")
        return str(finished[-1]["state"]) if finished else "unfinished"

    @property
    def stop_reason(self) -> str | None:
        """Reason of the end, in words."""
        finished = self.of("replicate_finished")
        reason = finished[-1].get("stop_reason") if finished else None
        return None if reason is None else str(reason)

    @property
    def target(self) -> Mapping[str, Any] | None:
        """Target of the training: ``metric``, ``value`` and ``mode`` (min or max)."""
        ready = self.first("peer_ready")
        return None if ready is None else ready.get("target")

    # -- peers and time ------------------------------------------------------------------------

    @cached_property
    def incarnations(self) -> dict[str, Incarnation]:
        """Incarnations of all replicas, by name."""
        return read_incarnations(self.events)

    @cached_property
    def span(self) -> tuple[float, float] | None:
        """Unix times [s] between which the swarm trained; None if it never did.

        From the release of the barrier (without that event, the first start of training) to the
        last peer's end of training (if no peer finished, the last event of any peer).
        """
        started = [item.started for item in self.incarnations.values() if item.started is not None]
        if not started:
            return None
        released = self.first("barrier_released")
        finished = [event["t"] for event in self.of("peer_finished")]
        last_seen = [event["t"] for event in self.events if event["peer"] is not None]
        began = min(started) if released is None else released["t"]
        return began, max(began, *(finished or last_seen))

    @cached_property
    def clock_s(self) -> float | None:
        """Training clock of the swarm at its end [s]: the maximum over the peers."""
        return max(
            (self.clock_of(e) for e in self.events if e.get("clock_s") is not None), default=None
        )

    def clock_of(self, event: Event) -> float:
        """Return the swarm's training clock [s] at an event that has a ``clock_s``.

        The clock of a peer begins with its own training. For a peer that joined later, it is
        shifted by the swarm's training clock at that time.
        """
        return float(event["clock_s"]) + self._offsets.get(event["peer"], 0.0)

    @cached_property
    def _offsets(self) -> dict[str, float]:
        late = [item for item in self.incarnations.values() if item.joined(self.spec.swarm.peers)]
        names = {item.name for item in late}
        known = [
            (event["t"], event["clock_s"])
            for event in self.events
            if event.get("clock_s") is not None and event["peer"] not in names
        ]
        began = 0.0 if self.span is None else self.span[0]
        offsets = {}
        for item in late:
            if item.started is not None:
                before = [point for point in known if point[0] <= item.started]
                moment, clock = max(before, default=(began, 0.0))
                offsets[item.name] = clock + max(0.0, item.started - moment)
        return offsets

    # -- rounds --------------------------------------------------------------------------------

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        """Rounds that at least one peer applied.

        With ``use_local_updates`` there are no gradient rounds, and transitions are counted.
        """
        if self.spec.swarm.use_local_updates:
            return tuple(self.by_round("transition"))
        applied = {event["round"] for event in self.of("round") if event["outcome"] in APPLIED}
        return tuple(sorted(applied))

    @cached_property
    def complete_rounds(self) -> dict[int, list[Event]]:
        """Gradient rounds that all initial peers averaged in one group at the first attempt.

        In a swarm of one peer, which has no groups, the applied rounds count.
        """
        return {
            number: events
            for number, events in self.by_round("round").items()
            if len({event["peer"] for event in events}) == len(events) == self.spec.swarm.peers
            and all(self._is_complete(event) for event in events)
        }

    def _is_complete(self, event: Event) -> bool:
        if self.spec.swarm.peers == 1:
            return event["outcome"] in APPLIED
        return bool(
            event["outcome"] == "averaged"
            and event.get("group_size") == self.spec.swarm.peers
            and not event.get("retries")
        )

    def applied(self, event: Event) -> bool:
        """Return whether a peer applied a ``round`` and did not undo it later."""
        undone = (event["peer"], event["round"]) in self.undone
        return event["outcome"] in APPLIED and not undone

    @cached_property
    def undone(self) -> frozenset[tuple[str, int]]:
        """Rounds (peer, round) whose samples no peer's parameters contain any more.

        A peer loses the rounds that it stepped alone (outcome ``alone`` or ``local``) or in one of
        several groups, if it loads the state of another peer before it averages with all peers
        again.
        """
        lost: set[tuple[str, int]] = set()
        own: dict[str, set[tuple[str, int]]] = defaultdict(set)
        grouped = Counter(
            (event["kind"], event["round"])
            for event in (*self.of("round"), *self.of("state_round"))
            if event["outcome"] in GROUPED
        )
        for event in self.events:
            kind, peer = event["kind"], event["peer"]
            if kind == "state_loaded":
                lost |= own.pop(peer, set())
            elif kind in ("round", "state_round"):
                met = (event.get("group_size") or 1) if event["outcome"] in GROUPED else 0
                if met and met >= grouped[kind, event["round"]]:
                    own.pop(peer, None)
                elif kind == "round" and event["outcome"] in APPLIED:
                    own[peer].add((peer, event["round"]))
        return frozenset(lost)

    # -- samples -------------------------------------------------------------------------------

    def committed(self, until: int | None = None) -> int:
        """Return the samples whose gradients entered an applied round, over the swarm.

        Args:
            until: Last round that counts; by default all rounds count.
        """
        if self.spec.swarm.use_local_updates:
            return self.computed  # every batch is applied as soon as it is computed
        return sum(
            event["samples"]
            for event in self.of("round")
            if self.applied(event) and (until is None or event["round"] <= until)
        )

    @cached_property
    def computed(self) -> int:
        """Samples that went through a backward pass, over the swarm."""
        return sum(self.computed_by_peer.values())

    @cached_property
    def computed_by_peer(self) -> dict[str, int]:
        """Samples that each peer is known to have computed.

        Peers report the number in ``computed`` of transitions and of ``progress``, at evaluations
        and at their end. For a peer that died the last report counts; without any report, the
        samples of its rounds do.
        """
        reported: dict[str, int] = defaultdict(int)
        entered: dict[str, int] = defaultdict(int)
        for event in self.events:
            kind, peer = event["kind"], event["peer"]
            if kind == "round":
                entered[peer] += event["samples"]
            count = event["samples"] if kind in _COUNTING else event.get("computed")
            if peer is not None and count is not None:
                reported[peer] = max(reported[peer], count)
        peers = reported.keys() | entered.keys()
        return {peer: max(reported[peer], entered[peer]) for peer in peers}


def group_by(events: Iterable[Event], field: str) -> dict[Any, list[Event]]:
    """Return events by the value of one field, values sorted."""
    groups: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        groups[event[field]].append(event)
    return {key: groups[key] for key in sorted(groups)}
