"""One replicate as its events tell it: by peer, by round and along the training clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from rayhive.errors import DamagedError
from rayhive.events import GROUPED, Event, read_events
from rayhive.metrics.incarnations import Incarnation, read_lives
from rayhive.spec.replicate import ReplicateSpec

#: Outcomes of a gradient round after which the optimizer stepped: their samples are committed.
APPLIED = frozenset({"averaged", "partial", "local", "alone"})
#: Kinds of events whose ``samples`` are all that the peer has computed so far.
_COUNTING = frozenset({"evaluation", "peer_finished"})
#: States of a replicate whose numbers count; every other end is a failure ...
FINISHED = frozenset({"completed", "timed_out"})
#: ... except this, of a replicate whose every attempt lost a part of the cluster ...
LOST = "lost"
#: ... and these: nothing can be said about the configuration (yet).
UNCOUNTED = frozenset({"stopped", "unfinished"})


@dataclass(frozen=True)
class EvaluationPoint:
    """What the peers measured on the held-out split after one round.

    Attributes:
        round: Rounds done before it.
        samples: Samples that the swarm had committed by then.
        clock_s: Training clock [s] when the last of the peers got there.
        values: Metric to its mean over the peers.
        spread: Metric to the largest difference between two peers.
        peers: Number of peers that evaluated.
        final: Whether this is the evaluation after the last round.
    """

    round: int
    samples: int
    clock_s: float
    values: Mapping[str, float]
    spread: Mapping[str, float]
    peers: int
    final: bool


class Timeline:
    """The events of one attempt at a replicate.

    Events of different peers may stand in any order; those of one peer are in the order in
    which they happened. Round ``n`` is the ``n``-th of the swarm, from 1. Each life of a logical
    peer is a peer of its own.

    Args:
        spec: What was to be run.
        events: What happened.
        log: The file that says so, if there is one.
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

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind."""
        return self._by_kind.get(kind, [])

    def of_peer(self, name: str) -> list[Event]:
        """Return the events of one peer, its supervisor's about it among them."""
        return self._by_name.get(name, [])

    @cached_property
    def _by_name(self) -> dict[str, list[Event]]:
        return _grouped((event for event in self.events if event["peer"] is not None), "peer")

    def first(self, kind: str) -> Event | None:
        """Return the first event of a kind, or None."""
        return next(iter(self.of(kind)), None)

    def by_peer(self, kind: str) -> dict[str, list[Event]]:
        """Return the events of one kind by the name of the peer, names sorted."""
        return _grouped(self.of(kind), "peer")

    def by_round(self, kind: str) -> dict[int, list[Event]]:
        """Return the events of one kind by round, rounds sorted."""
        return _grouped(self.of(kind), "round")

    # -- how it ended --------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The state that the supervisor found; ``unfinished`` if it never came to that."""
        finished = self.of("replicate_finished")
        return str(finished[-1]["state"]) if finished else "unfinished"

    @property
    def stop_reason(self) -> str | None:
        """Why it ended, in words."""
        finished = self.of("replicate_finished")
        reason = finished[-1].get("stop_reason") if finished else None
        return None if reason is None else str(reason)

    # -- who was there, and when ---------------------------------------------------------------

    @cached_property
    def lives(self) -> dict[str, Incarnation]:
        """Every peer that there was, each life of a slot on its own, by name."""
        return read_lives(self.events)

    @cached_property
    def span(self) -> tuple[float, float] | None:
        """Unix times [s] between which the swarm trained; None if it never did.

        From the release of the barrier (or the first that trained, where nobody released it) to
        the last peer's end of training, or what was heard last of any if none came to that.
        """
        started = [life.started for life in self.lives.values() if life.started is not None]
        if not started:
            return None
        released = self.first("barrier_released")
        finished = [event["t"] for event in self.of("peer_finished")]
        heard = [event["t"] for event in self.events if event["peer"] is not None]
        began = min(started) if released is None else released["t"]
        return began, max(began, *(finished or heard))

    # -- samples and time ----------------------------------------------------------------------

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        """The rounds that at least one peer applied.

        With ``use_local_updates`` there is no gradient round; a peer's transitions are counted.
        """
        if self.spec.swarm.use_local_updates:
            return tuple(self.by_round("transition"))
        applied = {event["round"] for event in self.of("round") if event["outcome"] in APPLIED}
        return tuple(sorted(applied))

    def committed(self, until: int | None = None) -> int:
        """Return the samples whose gradients entered a round that was applied, over the swarm.

        Args:
            until: Count rounds up to this one, included; by default all.
        """
        if self.spec.swarm.use_local_updates:
            return self.computed  # every batch is applied as soon as it is computed
        return sum(
            event["samples"]
            for event in self.of("round")
            if self.applied(event) and (until is None or event["round"] <= until)
        )

    def applied(self, event: Event) -> bool:
        """Return whether a peer's part in a round was applied, and not given up later."""
        undone = (event["peer"], event["round"]) in self.undone
        return event["outcome"] in APPLIED and not undone

    @cached_property
    def undone(self) -> frozenset[tuple[str, int]]:
        """Rounds (peer, round) whose samples are in no peer's parameters any more.

        A peer that stepped by itself (outcome ``alone`` or ``local``), or in one of several groups
        that averaged the same round, and took over another one's state before it averaged with all
        the others, has lost these steps.
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

    @cached_property
    def computed(self) -> int:
        """Samples that went through a backward pass, over the swarm."""
        return sum(self.computed_by_peer.values())

    @cached_property
    def computed_by_peer(self) -> dict[str, int]:
        """Samples that each peer is known to have computed.

        A peer tells its own count in ``computed`` of transitions and progress, at evaluations and
        when it finishes; of one that died, the last that it told is all that is known, and of one
        that told nothing, what entered its rounds.
        """
        told: dict[str, int] = defaultdict(int)
        entered: dict[str, int] = defaultdict(int)
        for event in self.events:
            kind, peer = event["kind"], event["peer"]
            if kind == "round":
                entered[peer] += event["samples"]
            count = event["samples"] if kind in _COUNTING else event.get("computed")
            if peer is not None and count is not None:
                told[peer] = max(told[peer], count)
        return {peer: max(told[peer], entered[peer]) for peer in told.keys() | entered.keys()}

    @cached_property
    def clock_s(self) -> float | None:
        """Training clock of the swarm [s] at its end: the furthest of the peers' clocks."""
        return max(
            (self.clock_of(e) for e in self.events if e.get("clock_s") is not None), default=None
        )

    def clock_of(self, event: Event) -> float:
        """Return the swarm's training clock [s] at an event that has a ``clock_s``.

        A peer's own clock begins when it begins to train; that of a peer which came later is
        moved to where the swarm's stood then.
        """
        return float(event["clock_s"]) + self._offsets.get(event["peer"], 0.0)

    @cached_property
    def _offsets(self) -> dict[str, float]:
        late = [life for life in self.lives.values() if life.joined(self.spec.swarm.peers)]
        names = {life.name for life in late}
        told = [
            (event["t"], event["clock_s"])
            for event in self.events
            if event.get("clock_s") is not None and event["peer"] not in names
        ]
        began = 0.0 if self.span is None else self.span[0]
        offsets = {}
        for life in late:
            if life.started is not None:
                before = [point for point in told if point[0] <= life.started]
                moment, clock = max(before, default=(began, 0.0))
                offsets[life.name] = clock + max(0.0, life.started - moment)
        return offsets

    # -- rounds of the whole swarm -------------------------------------------------------------

    @cached_property
    def complete_rounds(self) -> dict[int, list[Event]]:
        """The gradient rounds that as many peers as began averaged together at the first attempt.

        A swarm of one peer has no group: there the rounds that it applied count.
        """
        return {
            number: events
            for number, events in self.by_round("round").items()
            if len({event["peer"] for event in events}) == len(events) == self.spec.swarm.peers
            and all(self._complete(event) for event in events)
        }

    def _complete(self, event: Event) -> bool:
        if self.spec.swarm.peers == 1:
            return event["outcome"] in APPLIED
        return bool(
            event["outcome"] == "averaged"
            and event.get("group_size") == self.spec.swarm.peers
            and not event.get("retries")
        )

    # -- evaluations ---------------------------------------------------------------------------

    @cached_property
    def evaluations(self) -> tuple[EvaluationPoint, ...]:
        """The evaluations in the order of rounds, the final one (of all peers) last."""
        regular = [event for event in self.of("evaluation") if not event.get("final")]
        stayed = {life.name for life in self.lives.values() if life.end != "left"}
        final = [e for e in self.of("evaluation") if e.get("final") and e["peer"] in stayed]
        points = [self._point(events) for events in _grouped(regular, "round").values()]
        return tuple(points if not final else [*points, self._point(final)])

    def _point(self, events: list[Event]) -> EvaluationPoint:
        number = max(event["round"] for event in events)
        final = bool(events[0].get("final"))
        local = self.spec.swarm.use_local_updates
        metrics = set.intersection(*(set(event["values"]) for event in events))
        columns = {name: [e["values"][name] for e in events] for name in sorted(metrics)}
        return EvaluationPoint(
            round=number,
            samples=sum(event["samples"] for event in events) if local else self.committed(number),
            clock_s=max(self.clock_of(event) for event in events),
            values={name: fmean(values) for name, values in columns.items()},
            spread={name: max(values) - min(values) for name, values in columns.items()},
            peers=len({event["peer"] for event in events}),
            final=final,
        )

    @property
    def target(self) -> Mapping[str, Any] | None:
        """What had to be reached: ``metric``, ``value`` and ``mode`` (min or max)."""
        ready = self.first("peer_ready")
        return None if ready is None else ready.get("target")


def _grouped(events: Iterable[Event], field: str) -> dict[Any, list[Event]]:
    groups: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        groups[event[field]].append(event)
    return {key: groups[key] for key in sorted(groups)}


def read_timelines(folder: str | Path) -> Iterator[Timeline]:
    """Yield every attempt that a replicate's folder tells of, the oldest first.

    ``events.jsonl`` is of the latest attempt, ``events.attempt-N.jsonl`` of those before it. Each
    ``replicate_started`` begins an attempt and carries its spec; ``spec.json`` speaks for a log
    that ends before that.

    Raises:
        DamagedError: A file cannot be read, or nothing says what was to be run; raised after
            what can be read.
    """
    folder = Path(folder)
    logs = sorted(folder.glob("events.attempt-*.jsonl"), key=lambda log: (len(log.name), log.name))
    if (latest := folder / "events.jsonl").exists():
        logs.append(latest)
    damage: DamagedError | None = None
    if not logs:
        yield Timeline(_spec(folder, None, []), [])
    for log in logs:
        try:
            read = [Timeline(_spec(folder, log, events), events, log) for events in _segments(log)]
        except DamagedError as error:
            damage = damage or error
            continue
        yield from read
    if damage is not None:
        raise damage


def _segments(log: Path) -> list[list[Event]]:
    """Split a log where another attempt begins."""
    segments: list[list[Event]] = [[]]
    for event in read_events(log):
        if event["kind"] == "replicate_started" and segments[-1]:
            segments.append([])
        segments[-1].append(event)
    return segments


def _spec(folder: Path, log: Path | None, events: list[Event]) -> ReplicateSpec:
    told = next((e.get("spec") for e in events if e["kind"] == "replicate_started"), None)
    path = log if told is not None and log is not None else folder / "spec.json"
    try:
        if told is not None:
            return ReplicateSpec.model_validate(told)
        return ReplicateSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DamagedError(path, f"nothing says what was run here: {error}") from error
    except ValidationError as error:
        first = str(error).splitlines()[0]
        raise DamagedError(path, f"not a replicate's specification: {first}") from error
