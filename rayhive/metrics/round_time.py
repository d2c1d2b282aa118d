"""Seconds of one incarnation by class, from one transition to the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rayhive.events import Event
from rayhive.metrics.incarnations import Incarnation
from rayhive.metrics.live_capacity import Window, overlap
from rayhive.metrics.timeline import Timeline

PRODUCTIVE = "productive_s"
MATCHMAKING = "badput_matchmaking_s"
AVERAGING = "badput_averaging_s"
TRANSFER = "badput_state_transfer_s"
RETRY = "badput_retry_s"
STALLED = "badput_stalled_s"
DOWN = "badput_down_s"
EVALUATION = "evaluation_s"

Part = tuple[str, float]


def incarnation_time(
    timeline: Timeline,
    incarnation: Incarnation,
    stops: Mapping[str, Sequence[Window]],
    window: Window,
) -> dict[str, float]:
    """Return the seconds of each class in the window of a replica that one incarnation fills.

    Args:
        timeline: The replicate.
        incarnation: The incarnation. After its end the replica is down, or waits for the other
            peers to finish.
        stops: Peer to the windows during which a fault stopped it.
        window: Begin and end [s, Unix time].

    Returns:
        Class -> seconds; they add up to the window.
    """
    return _TimeAccount(timeline, incarnation, stops.get(incarnation.name, ()), window).spent


class _TimeAccount:
    """Division of a window into classes, from event to event.

    Time that no event explains belongs to a class that depends on the surrounding events.
    """

    def __init__(
        self,
        timeline: Timeline,
        incarnation: Incarnation,
        stops: Sequence[Window],
        window: Window,
    ) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._timeline, self._incarnation, self._stops = timeline, incarnation, stops
        self._delay = timeline.spec.configuration.delay
        self._at, until = window
        ended = incarnation.ended
        self._end = until if ended is None else min(max(ended, self._at), until)
        self._own = timeline.of_peer(incarnation.name)
        self._loads = self._of("state_loaded")
        self._training()
        self._end = until
        self._fill(until, (), STALLED if incarnation.end == "peer_finished" else DOWN)

    def _of(self, kind: str) -> list[Event]:
        return [event for event in self._own if event["kind"] == kind]

    def _training(self) -> None:
        """Account for the time until the end of the incarnation."""
        start = self._incarnation.started
        if start is None:
            self._fill(self._end, self._transfers(self._end), DOWN)
            return
        late = self._incarnation.joined(self._timeline.spec.swarm.peers)
        self._fill(start, self._transfers(start), DOWN if late else STALLED)
        rounds = {event["round"]: event for event in self._of("round")}
        states = {event["round"]: event for event in self._of("state_round")}
        clock = 0.0
        for step in self._of("transition"):
            number = step["round"]
            self._between(step, step["clock_s"] - clock, rounds.get(number), states.get(number))
            clock = step["clock_s"]
        self._tail(clock)

    def _between(
        self, step: Event, clock_s: float, round_: Event | None, state: Event | None
    ) -> None:
        """Account for the time from the previous transition to this one."""
        parts = self._known(step["t"], clock_s)
        explained = sum(seconds for name, seconds in parts if name != TRANSFER)
        if round_ is not None and self._delay != "gradients":  # not in the background
            parts += _waits(round_)
        parts += self._update(step.get("update_s") or 0.0, state)
        work, rest = PRODUCTIVE, STALLED if self._delay == "none" else AVERAGING
        if round_ is not None and not (self._timeline.applied(round_) and round_["samples"]):
            work = RETRY
        accumulating = None if round_ is None else round_.get("accumulating_s")
        loads = self._within(self._loads, step["t"])
        if loads:
            # samples from before the load are discarded, unless all loads kept them
            rest = work if all(load.get("kept") for load in loads) else RETRY
            explained = 0.0  # accumulation began again with the load
        elif accumulating is None:
            rest = work
        if accumulating is not None and round_ is not None:
            waited = round_.get("background_s") or 0.0
            parts += [(AVERAGING, waited), (work, accumulating - explained - waited)]
        self._fill(step["t"], parts, rest)

    def _tail(self, clock: float) -> None:
        """Account for the time from the last transition to the end of the incarnation."""
        end, own = self._incarnation.end, self._own
        last = next((event for event in reversed(own) if event["kind"] == end), None)
        parts = self._known(self._end, None)
        rest = PRODUCTIVE  # pending samples
        if end == "peer_finished" and last is not None:
            parts = self._known(self._end, last["clock_s"] - clock)
        elif end == "left" and last is not None:
            kept, lost = last.get("handed_over") or 0, last.get("lost") or 0
            work = self._end - self._at - sum(seconds for _, seconds in parts)
            if lost:
                parts.append((RETRY, work * lost / (kept + lost)))
            elif not kept:
                rest = STALLED  # time of the departure itself
        elif end is not None:
            rest = RETRY
        self._fill(self._end, parts, rest)

    def _known(self, moment: float, clock_s: float | None) -> list[Part]:
        """Return the parts of the time up to a moment that do not depend on the round's outcome."""
        moment = self._clamp(moment)
        parts = [(STALLED, overlap((self._at, moment), self._stops))]
        if clock_s is not None:
            parts.append((EVALUATION, max(0.0, moment - self._at - clock_s)))
        breaks = self._within(self._of("stepped_in"), moment)
        parts += [(STALLED, event["seconds"]) for event in breaks]
        return parts + self._transfers(moment)

    def _transfers(self, moment: float) -> list[Part]:
        return [(TRANSFER, event["seconds"]) for event in self._within(self._loads, moment)]

    def _within(self, events: Iterable[Event], moment: float) -> list[Event]:
        return [event for event in events if self._at < event["t"] <= moment]

    def _update(self, update_s: float, state: Event | None) -> list[Part]:
        if state is None or self._delay != "none":
            return [(PRODUCTIVE, update_s)]
        parts, left = [], update_s
        for name, seconds in _waits(state):
            parts.append((name, min(seconds, left)))
            left -= parts[-1][1]
        return [*parts, (PRODUCTIVE, left)]

    def _clamp(self, moment: float) -> float:
        return min(max(moment, self._at), self._end)

    def _fill(self, moment: float, parts: Iterable[Part], rest: str) -> None:
        """Divide the time up to a moment among the parts in order; the remainder is ``rest``."""
        moment = self._clamp(moment)
        left = moment - self._at
        for name, seconds in parts:
            taken = min(max(seconds, 0.0), left)
            self.spent[name] += taken
            left -= taken
        self.spent[rest] += left
        self._at = moment


def _waits(event: Event) -> list[Part]:
    """Return the waiting time of a ``round`` or ``state_round`` by class."""
    averaging = event.get("averaging_s") or 0.0
    if event["outcome"] not in ("averaged", "partial"):
        return [(RETRY, averaging)]  # failed; 0 s if no group formed
    matching = event.get("matchmaking_s") or 0.0
    waited = max(event.get("waited_s") or averaging + matching, matching)
    again = max(0.0, waited - matching - averaging) if event.get("retries") else 0.0
    return [(MATCHMAKING, matching), (RETRY, again), (AVERAGING, waited - matching - again)]
