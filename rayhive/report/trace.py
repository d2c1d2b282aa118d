"""Trace of a replicate for Perfetto (https://ui.perfetto.dev), on one clock.

The format is Chrome's trace event format, which Perfetto reads: slices (``X``), instants (``i``),
counters (``C``), arrows from faults to the peers that they struck (``s``, ``f``) and names (``M``),
with times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rayhive import events
from rayhive.events import Event
from rayhive.files import write_atomically
from rayhive.metrics.clocks import Clocks, on_one_clock
from rayhive.timeline import Incarnation, Timeline

#: Tracks of a peer, in order.
PROCESS, ROUNDS, GRADIENTS, PARAMETERS, STATES = range(1, 6)
TRACKS = {
    PROCESS: "process",
    ROUNDS: "rounds",
    GRADIENTS: "averaging of gradients",
    PARAMETERS: "averaging of parameters",
    STATES: "state transfers and pauses",
}
#: Process of the trace with the faults; peers follow.
SUPERVISOR = 1
#: Bound of the number of tracks of a process: as many as faults.
_MOST_TRACKS = 100_000
#: Events that are shown as a moment, with the track.
_MOMENTS: dict[type[Event], int] = {
    events.PeerReady: PROCESS,
    events.TrainingStarted: PROCESS,
    events.Notice: PROCESS,
    events.Left: PROCESS,
    events.PeerLost: PROCESS,
    events.PeerFailed: PROCESS,
    events.PeerFinished: PROCESS,
    events.SteppedOut: STATES,
    events.Reunited: STATES,
    events.Fallback: GRADIENTS,
    events.Rejected: GRADIENTS,
    events.FaultActed: PROCESS,
}
#: Events that are shown as a slice of the track of states, which they end, with its text.
_STATE_SLICES: dict[type[Event], str] = {
    events.StateLoaded: "state download",
    events.SteppedIn: "stepped out",
    events.RolledBack: "back to a checkpoint",
}
#: Fields of an event that are not shown as its arguments: long, or shown in another way.
_HIDDEN = frozenset({"kind", "t", "peer", "group", "phases", "shapes", "traceback", "versions"})


@dataclass
class _Trace:
    """Trace events, with times relative to the beginning of the replicate.

    Slices of one track never overlap in part, or a viewer draws them wrong: one that would begin
    before its predecessor ended begins later.

    Attributes:
        began: Begin of the replicate [s, Unix time].
        events: Entries of the file.
        lives: Incarnation -> its process in the trace, begin and end [s, Unix time].
    """

    began: float
    events: list[dict[str, Any]] = field(default_factory=list)
    lives: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    _free: dict[tuple[int, int], float] = field(default_factory=dict)
    _flows: int = 0

    def name(self, process: int, text: str, track: int | None = None) -> None:
        kind, where = (
            ("process_name", {})
            if track is None
            else ("thread_name", {"tid": _tid(process, track)})
        )
        self.events.append(
            {"ph": "M", "pid": process, **where, "name": kind, "args": {"name": text}}
        )
        sort = kind.replace("name", "sort_index")
        index = {"sort_index": process if track is None else track}
        self.events.append({"ph": "M", "pid": process, **where, "name": sort, "args": index})

    def slice(
        self,
        place: tuple[int, int],
        text: str,
        begin: float,
        end: float,
        args: Mapping[str, Any] | None = None,
        within: tuple[float, float] | None = None,
    ) -> tuple[float, float]:
        """Add a slice, and return its begin and end [s].

        Args:
            place: Process and track.
            text: Name.
            begin: Begin [s, Unix time].
            end: End [s, Unix time].
            args: Values that a click shows.
            within: Slice that contains this one; None for one of the track itself.
        """
        if within is None:
            begin = max(begin, self._free.get(place, begin))
            end = max(begin, end)
            self._free[place] = end
        else:
            begin, end = (min(max(time, within[0]), within[1]) for time in (begin, end))
        process, track = place
        entry = {
            "ph": "X",
            "pid": process,
            "tid": _tid(process, track),
            "name": text,
            "cat": TRACKS.get(track, ""),
        }
        times = {"ts": self._us(begin), "dur": self._us(end) - self._us(begin)}
        self.events.append({**entry, **times, "args": dict(args or {})})
        return begin, end

    def moment(self, place: tuple[int, int], text: str, at: float, args: Mapping[str, Any]) -> None:
        process, track = place
        entry = {"ph": "i", "s": "t", "pid": process, "tid": _tid(process, track), "name": text}
        self.events.append({**entry, "ts": self._us(at), "args": dict(args)})

    def count(self, process: int, text: str, at: float, values: Mapping[str, float]) -> None:
        entry = {"ph": "C", "pid": process, "name": text, "ts": self._us(at)}
        self.events.append({**entry, "args": dict(values)})

    def flow(self, text: str, points: Sequence[tuple[tuple[int, int], float]]) -> None:
        """Add an arrow from the first point (process and track, time) to each of the others."""
        (begin, since), *others = points
        for place, at in others:
            self._flows += 1
            shared = {"cat": "fault", "name": text, "id": self._flows}
            for phase, (process, track), time in (("s", begin, since), ("f", place, at)):
                entry = {**shared, "ph": phase, "pid": process, "tid": _tid(process, track)}
                bind = {"bp": "e"} if phase == "f" else {}  # to the slice around it
                self.events.append({**entry, **bind, "ts": self._us(time)})

    def _us(self, time: float) -> int:
        return round((time - self.began) * 1e6)


def _tid(process: int, track: int) -> int:
    """Return the id of a track, unique over all processes, as those of threads on a machine are."""
    return _MOST_TRACKS * process + track


def write_trace(timeline: Timeline, path: Path) -> Clocks:
    """Write the trace of a replicate, and return the clocks that it was made with."""
    found, clocks = trace_of(timeline)
    write_atomically(path, json.dumps(found, separators=(",", ":")), durable=False, mode=0o644)
    return clocks


def trace_of(timeline: Timeline) -> tuple[dict[str, Any], Clocks]:
    """Return the trace of a replicate and the clocks of its nodes.

    Every time is on the clock of the supervisor: that of an event on a node, less the estimated
    offset of the node's clock. The offsets and their bounds are in the names of the peers' tracks
    and in ``otherData``.
    """
    if timeline.clocks is None:
        timeline = on_one_clock(timeline)
    clocks = timeline.clocks
    assert clocks is not None
    times = [event.t for event in timeline.events]
    trace = _Trace(began=min(times, default=0.0))
    ended = max(times, default=0.0)
    trace.name(SUPERVISOR, "supervisor and faults")
    trace.name(SUPERVISOR, "barrier", 0)
    for process, (name, peer) in enumerate(timeline.incarnations.items(), start=SUPERVISOR + 1):
        trace.name(process, f"{name}{_clock_text(clocks, name)}")
        for track, text in TRACKS.items():
            trace.name(process, text, track)
        _peer(trace, process, _Peer(timeline, peer, ended))
    _faults(trace, timeline, ended)
    spec = timeline.spec
    about = {
        "study": spec.study,
        "configuration": spec.label,
        "trial": spec.trial,
        "scenario": spec.scenario,
        "replicate": spec.replicate,
        "seed": spec.seed,
        "state": timeline.state,
        "began_unix_s": trace.began,
        "clock": "supervisor",
        "clock_slack_s": clocks.slack_s,
        "clock_offsets_s": {
            node: {"estimate": each.seconds, "low": _plain(each.low), "high": _plain(each.high)}
            for node, each in clocks.offsets.items()
        },
    }
    return {"traceEvents": trace.events, "displayTimeUnit": "ms", "otherData": about}, clocks


@dataclass(frozen=True)
class _Peer:
    """Events of one incarnation, with their times on the common clock."""

    timeline: Timeline
    incarnation: Incarnation
    ended: float

    def of(self, *kinds: type[Event]) -> Iterator[tuple[float, Any]]:
        """Yield time and event of some kinds, in the order of the log."""
        for event in self.timeline.of_peers.get(self.incarnation.name, []):
            if isinstance(event, kinds):
                yield event.t, event


def _peer(trace: _Trace, process: int, peer: _Peer) -> None:
    times = [time for time, _ in peer.of(Event)]
    begin = min(times)
    end = peer.incarnation.ended
    last = peer.ended if end is None else end
    life = trace.slice((process, PROCESS), peer.incarnation.name, begin, max(last, begin))
    trace.lives[peer.incarnation.name] = process, *life
    marks = [begin]
    for kind, text in ((events.PeerReady, "starts"), (events.TrainingStarted, "waits for others")):
        for at, _ in list(peer.of(kind))[:1]:
            trace.slice((process, PROCESS), text, marks[-1], at, within=life)
            marks.append(at)
    _rounds(trace, process, peer)
    for at, event in peer.of(events.Round, events.StateRound):
        track = GRADIENTS if isinstance(event, events.Round) else PARAMETERS
        _averaging(trace, (process, track), at, event)
    for at, event in peer.of(*_STATE_SLICES):
        text = _STATE_SLICES[type(event)]
        trace.slice((process, STATES), text, at - event.seconds, at, _arguments(event))
    for at, event in peer.of(events.Checkpoint):
        began = at - (event.seconds or 0.0)
        trace.slice((process, STATES), "checkpoint", began, at, _arguments(event))
    for at, event in peer.of(*_MOMENTS):
        trace.moment((process, _MOMENTS[type(event)]), event.kind, at, _arguments(event))
    for at, event in peer.of(events.Evaluation):
        known = {name: value for name, value in event.values.items() if _plain(value) is not None}
        if known:
            trace.count(process, "held out", at, known)  # a viewer adds the name of each value
    for at, event in peer.of(events.Round):
        if event.live_peers is not None:
            trace.count(process, "live", at, {"peers": event.live_peers})


def _rounds(trace: _Trace, process: int, peer: _Peer) -> None:
    """Add the rounds of a peer, from one transition to the next, with their parts."""
    gradient = {event.round: (at, event) for at, event in peer.of(events.Round)}
    marks = list(peer.of(events.TrainingStarted, events.Transition))
    for (before, _), (at, event) in pairwise(marks):
        if not isinstance(event, events.Transition):
            continue
        place = (process, ROUNDS)
        whole = trace.slice(place, f"round {event.round}", before, at, _arguments(event))
        averaged, found = gradient.get(event.round, (None, None))
        if found is None or averaged is None or not whole[0] <= averaged <= whole[1]:
            continue  # with delayed gradients the averaging goes on beside the next round
        waits = averaged - (found.waited_s or 0.0)
        trace.slice(place, "computes", whole[0], waits, within=whole)
        trace.slice(place, f"averages ({found.outcome})", waits, averaged, within=whole)
        trace.slice(place, "updates", averaged, whole[1], within=whole)


def _averaging(trace: _Trace, place: tuple[int, int], at: float, event: Any) -> None:
    """Add an averaging: the forming of the group, then the phases of the all-reduce."""
    reduced = at - (event.averaging_s or 0.0)
    began = reduced - (event.matchmaking_s or 0.0)
    text = f"round {event.round}: {event.outcome}"
    if isinstance(event, events.StateRound) and event.reason is not None:
        text += f" ({event.reason})"
    whole = trace.slice(place, text, began, at, _arguments(event))
    trace.slice(place, "group formation", began, reduced, within=whole)
    begin = reduced
    for phase in event.phases or []:
        end = begin + float(phase.get("seconds") or 0.0)
        trace.slice(place, str(phase.get("name", "all-reduce")), begin, end, phase, within=whole)
        begin = end


def _faults(trace: _Trace, timeline: Timeline, ended: float) -> None:
    healed = {event.fault: event for event in timeline.of(events.FaultHealed)}
    for track, event in enumerate(timeline.of(events.FaultFired), start=1):
        place = (SUPERVISOR, track)
        who = ", ".join(event.who or ())
        trace.name(SUPERVISOR, f"{event.fault} {event.fault_kind}", track)
        heal = healed.get(event.fault)
        until = event.t if event.effect == "none" and heal is None else ended
        until = until if heal is None else heal.t
        began = event.t if event.began is None else event.began
        text = f"{event.fault_kind} {who}".rstrip()
        whole = trace.slice(place, text, began, until, _arguments(event))
        trace.slice(place, "injection", began, event.t, within=whole)
        struck = [trace.lives[name] for name in event.lives or () if name in trace.lives]
        ends = [((at, PROCESS), min(max(began, low), high)) for at, low, high in struck]
        for peer, at in ends:  # a viewer joins an arrow with the latest slice of a track
            trace.moment(peer, f"struck by {text}", at, {"fault": event.fault})
        trace.flow(text, [(place, whole[0]), *ends])
        verified, failed = timeline.of(events.FaultVerified), timeline.of(events.FaultFailed)
        steps: list[events.FaultVerified | events.FaultFailed] = [*verified, *failed]
        for step in steps:
            if step.fault == event.fault:
                trace.moment(place, step.kind, step.t, _arguments(step))
    for released in timeline.of(events.BarrierReleased):
        trace.moment((SUPERVISOR, 0), "training begins", released.t, _arguments(released))
    for noticed in timeline.of(events.NodeNoticed):
        text = f"real notice of {noticed.source}"
        trace.moment((SUPERVISOR, 0), text, noticed.t, _arguments(noticed))


def _clock_text(clocks: Clocks, peer: str) -> str:
    """Return the offset of a peer's clock with its bounds, for the name of its tracks."""
    offset = clocks.offsets.get(clocks.nodes.get(peer, ""))
    if offset is None:
        return ""
    low, high = (
        f"{value * 1e3:+.0f}" if _plain(value) is not None else "?"
        for value in (offset.low, offset.high)
    )
    return f" (clock {offset.seconds * 1e3:+.0f} ms, between {low} and {high})"


def _arguments(event: Event) -> dict[str, Any]:
    return {
        name: _plain(value)
        for name, value in event.stored().items()
        if name not in _HIDDEN and value is not None
    }


def _plain(value: Any) -> Any:
    """Return a value as strict JSON has it: no NaN and no infinity."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
