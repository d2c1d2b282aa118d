"""Badput: the wall time of the peers by class."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby, zip_longest
from typing import TypeVar

from rayhive.columns import Row, in_group
from rayhive.events import (
    GROUPED,
    Checkpoint,
    Event,
    Left,
    PeerFinished,
    RolledBack,
    Round,
    StateLoaded,
    StateRound,
    SteppedIn,
    Transition,
)
from rayhive.metrics.group import MetricGroup, averaged
from rayhive.metrics.live_capacity import Window, fault_windows, overlap
from rayhive.timeline import Incarnation, Timeline

PRODUCTIVE = "productive_s"
MATCHMAKING = "badput_matchmaking_s"
AVERAGING = "badput_averaging_s"
TRANSFER = "badput_state_transfer_s"
RETRY = "badput_retry_s"
STALLED = "badput_stalled_s"
DOWN = "badput_down_s"
EVALUATION = "evaluation_s"

#: A class, and its seconds.
Part = tuple[str, float]
E = TypeVar("E", bound=Event)


_seconds = partial(averaged, unit="s")


class Badput(MetricGroup):
    """Columns of the replicas' wall time; every second belongs to exactly one class.

    The time of a replica runs from the start of training (if it joined later, from its first
    spawn) to the end of training, including the time in which it has no process. ``peer_seconds``
    [s] is the sum over the replicas: wall time x peers. The other columns add up to it, which is
    asserted. All are in seconds, summed over the replicas. Durations within a round are taken from
    its events.

    * ``productive_s``: computing gradients that entered an applied round (or that were pending
      when training ended), and stepping the optimizer.
    * ``badput_matchmaking_s``: waiting for a group, of gradients and of parameters.
    * ``badput_averaging_s``: all-reduces that the training thread waited for. With delays, only
      the wait for results that were not ready in time.
    * ``badput_state_transfer_s``: loading the state from other peers, and writing checkpoints.
    * ``badput_retry_s``: failed averaging attempts, and computing samples that were lost with a
      skipped round, a loaded state, a return to a checkpoint or the death of the peer.
    * ``badput_stalled_s``: stopped by a ``pause``; waiting at the barrier, for other peers to
      finish, or for a group that no other peer joined.
    * ``badput_down_s``: no process for the replica: from the loss, failure or departure of an
      incarnation until the next one began to train, less that one's state transfer; and from the
      end of a training process to the return to a checkpoint (``rolled_back``).
    * ``evaluation_s``: evaluating on the held-out split and fingerprinting the weights: wall time
      that the training clock leaves out.
    """

    columns = in_group(
        "time",
        _seconds("peer_seconds", "Wall time x peers, the sum of the columns below"),
        _seconds(PRODUCTIVE, "Computing committed samples"),
        _seconds(MATCHMAKING, "Waiting for a group"),
        _seconds(AVERAGING, "Waiting for an all-reduce"),
        _seconds(TRANSFER, "Loading the state from other peers, and writing checkpoints"),
        _seconds(RETRY, "Failed attempts and lost computation"),
        _seconds(STALLED, "Stopped, or waiting for other peers"),
        _seconds(DOWN, "No process for the replica"),
        _seconds(EVALUATION, "Evaluating, outside the training clock"),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        total_name, *classes = self.names("replicate")
        if timeline.span is None:
            return dict.fromkeys((total_name, *classes))
        spent, total = time_spent(timeline)
        return {total_name: total, **{name: spent[name] for name in classes}}


def time_spent(timeline: Timeline) -> tuple[dict[str, float], float]:
    """Return the seconds of each class, and the wall time of all replicas [s].

    Raises:
        AssertionError: The classes do not add up to the wall time.
    """
    assert timeline.span is not None
    spent: dict[str, float] = defaultdict(float)
    total, stops = 0.0, fault_windows(timeline, ["stopped"])
    for _, group in groupby(timeline.incarnations.values(), key=lambda each: each.replica):
        incarnations = list(group)
        begin, end = timeline.span
        if incarnations[0].joined(timeline.spec.swarm.peers):
            begin = _when(incarnations[0], begin, end)
        total += end - begin
        for item, following in zip_longest(incarnations, incarnations[1:]):
            until = end if following is None else _when(following, begin, end)
            account = _TimeAccount(timeline, item, stops.get(item.name, ()), (begin, until))
            for name, seconds in account.spent.items():
                spent[name] += seconds
            begin = until
    added = math.fsum(spent.values())
    assert math.isclose(added, total, rel_tol=1e-9, abs_tol=1e-6), f"{added} s of {total} s"
    return spent, total


def _when(incarnation: Incarnation, begin: float, end: float) -> float:
    """Return the first known Unix time of an incarnation [s], clamped to a window."""
    moments = (incarnation.spawned, incarnation.started, incarnation.ended)
    return min(max(next((at for at in moments if at is not None), end), begin), end)


class _TimeAccount:
    """Division of the time of one incarnation into classes, from event to event.

    Time that no event explains belongs to a class that depends on the surrounding events.

    Args:
        timeline: The replicate.
        incarnation: The incarnation. After its end the replica is down, or waits for the other
            peers to finish.
        stops: Windows during which a fault stopped it.
        window: Begin and end of the time of the replica that belongs to it [s, Unix time].

    Attributes:
        spent: Class -> seconds; they add up to the window.
    """

    def __init__(
        self, timeline: Timeline, incarnation: Incarnation, stops: Sequence[Window], window: Window
    ) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._timeline, self._incarnation, self._stops = timeline, incarnation, stops
        self._delay = timeline.spec.configuration.delay
        self._at, until = window
        ended = incarnation.ended
        self._end = until if ended is None else min(max(ended, self._at), until)
        self._loads = timeline.of(StateLoaded, incarnation.name)
        self._breaks = timeline.of(SteppedIn, incarnation.name)
        self._returns = timeline.of(RolledBack, incarnation.name)
        self._checkpoints = timeline.of(Checkpoint, incarnation.name)
        self._training()
        self._end = until
        finished = isinstance(incarnation.end, PeerFinished)
        self._fill(until, (), STALLED if finished else DOWN)

    def _training(self) -> None:
        """Account for the time until the end of the incarnation."""
        start = self._incarnation.started
        if start is None:
            self._fill(self._end, self._transfers(self._end), DOWN)
            return
        late = self._incarnation.joined(self._timeline.spec.swarm.peers)
        self._fill(start, self._transfers(start), DOWN if late else STALLED)
        name, clock = self._incarnation.name, 0.0
        rounds = {self._numbered(event): event for event in self._timeline.of(Round, name)}
        states = {self._numbered(event): event for event in self._timeline.of(StateRound, name)}
        for step in self._timeline.of(Transition, name):
            clock_s = None if step.clock_s is None else step.clock_s - clock
            number = self._numbered(step)
            self._between(step, clock_s, rounds.get(number), states.get(number))
            clock = step.clock_s or clock
        self._tail(clock)

    def _numbered(self, event: Round | StateRound | Transition) -> tuple[int, int]:
        """Return how often the peer had returned to a checkpoint, and the number of the round."""
        return sum(back.t <= event.t for back in self._returns), event.round

    def _between(
        self,
        step: Transition,
        clock_s: float | None,
        round_: Round | None,
        state: StateRound | None,
    ) -> None:
        """Account for the time from the previous transition to this one."""
        parts = self._known(step.t, clock_s)
        # a round of a baseline begins after the evaluation
        apart = {TRANSFER} if self._timeline.spec.baseline is None else {TRANSFER, EVALUATION}
        explained = sum(seconds for name, seconds in parts if name not in apart)
        if round_ is not None and self._delay != "gradients":  # not in the background
            parts += _waits(round_)
        parts += self._update(step.update_s or 0.0, state)
        work, rest = PRODUCTIVE, STALLED if self._delay == "none" else AVERAGING
        if round_ is not None and not (self._timeline.applied(round_) and round_.samples):
            work = RETRY
        accumulating = None if round_ is None else round_.accumulating_s
        loads = self._within(self._loads, step.t)
        if self._within(self._returns, step.t):
            rest, explained = RETRY, 0.0  # samples from before it are discarded
        elif loads:
            # samples from before the load are discarded, unless all loads kept them
            rest = work if all(load.kept for load in loads) else RETRY
            explained = 0.0  # accumulation began again with the load
        elif accumulating is None:
            rest = work
        if accumulating is not None and round_ is not None:
            waited = round_.background_s or 0.0
            parts += [(AVERAGING, waited), (work, accumulating - explained - waited)]
        self._fill(step.t, parts, rest)

    def _tail(self, clock: float) -> None:
        """Account for the time from the last transition to the end of the incarnation."""
        end = self._incarnation.end
        parts = self._known(self._end, None)
        rest = PRODUCTIVE  # pending samples
        if isinstance(end, PeerFinished):
            parts = self._known(self._end, None if end.clock_s is None else end.clock_s - clock)
            rest = PRODUCTIVE if end.samples else STALLED  # a peer beside a baseline computes none
        elif isinstance(end, Left):
            kept, lost = end.handed_over or 0, end.lost or 0
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
        parts += [(STALLED, event.seconds) for event in self._within(self._breaks, moment)]
        for back in self._within(self._returns, moment):
            loading = back.load_s or 0.0
            parts += [(TRANSFER, loading), (DOWN, back.seconds - loading)]
        return parts + self._transfers(moment)

    def _transfers(self, moment: float) -> list[Part]:
        parts = [(TRANSFER, event.seconds) for event in self._within(self._loads, moment)]
        written = self._within(self._checkpoints, moment)
        return parts + [(TRANSFER, event.seconds or 0.0) for event in written]

    def _within(self, events: Iterable[E], moment: float) -> list[E]:
        return [event for event in events if self._at < event.t <= moment]

    def _update(self, update_s: float, state: StateRound | None) -> list[Part]:
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


def _waits(event: Round | StateRound) -> list[Part]:
    """Return the waiting time of an averaging by class."""
    averaging = event.averaging_s or 0.0
    if event.outcome not in GROUPED:
        return [(RETRY, averaging)]  # failed; 0 s if no group formed
    matching = event.matchmaking_s or 0.0
    waited = max(event.waited_s or averaging + matching, matching)
    again = max(0.0, waited - matching - averaging) if event.retries else 0.0
    return [(MATCHMAKING, matching), (RETRY, again), (AVERAGING, waited - matching - again)]
