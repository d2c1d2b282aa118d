"""Invariant ``samples_conserved``: every computed sample is accounted for once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from rayhive.events import (
    Event,
    Left,
    PeerFinished,
    RolledBack,
    Round,
    StateLoaded,
    Transition,
)
from rayhive.invariants.base import Invariant
from rayhive.timeline import Timeline


class SamplesConserved(Invariant):
    """For every peer: computed samples = samples in rounds + lost samples + pending samples.

    The sum is checked at each ``transition``, whose ``computed`` counts the samples that went
    through a backward pass, and at the end (``samples`` and ``pending`` of ``peer_finished``).
    Samples in rounds are ``samples`` of ``round`` events; lost samples are ``lost`` of ``round``,
    ``state_loaded``, ``left`` and ``rolled_back`` events. A return to a checkpoint
    (``rolled_back``) takes the samples of the rounds that it undoes, and those that were pending,
    from the rounds to its ``lost``. Nothing is pending right after a transition. A transition whose
    ``round`` event has not come yet, as with delayed gradients, is left out.

    No loss may be negative, and a round with samples of a peer has no losses of it. If
    ``peer_finished`` lacks ``pending``, only an upper bound is checked: no more samples entered
    rounds than were computed.
    """

    about = "Computed samples = committed + lost + pending, of every peer."

    def check(self, log: Timeline) -> list[str]:
        """Return the events at which the sums differ."""
        return [text for name in log.trained for text in self._of_incarnation(log, name)]

    def _of_incarnation(self, log: Timeline, name: str) -> Iterator[str]:
        # Samples of the peer that each round took, averaged or lost.
        entered: dict[int, int] = {}
        dropped = 0
        for part in split_after(log.of_peers[name], RolledBack):
            rounds = [event for event in part if isinstance(event, Round)]
            entered |= {event.round: event.samples + (event.lost or 0) for event in rounds}
            so_far = sums(entered)
            for event in part:
                if isinstance(event, (Round, StateLoaded, Left)):
                    lost = event.lost or 0
                    used = event.samples if isinstance(event, Round) else 0
                    if lost < 0 or (lost and used):
                        yield f"{name}, {event.kind} {event.round}: {lost} lost, {used} not"
                    if not isinstance(event, Round):
                        dropped += lost
                elif isinstance(event, RolledBack):
                    undone = [number for number in entered if number > event.round]
                    if event.lost < sum(entered[number] for number in undone):
                        yield f"{name}, {event.kind} {event.round}: only {event.lost} lost"
                    entered = {n: entered[n] for n in entered if n not in undone}
                    dropped += event.lost
                elif isinstance(event, Transition):
                    if event.computed is not None and event.round in entered:
                        known = so_far[event.round] + dropped
                        yield from self._equal(name, f"round {event.round}", event.computed, known)
                elif isinstance(event, PeerFinished):
                    done = sum(entered.values()) + dropped
                    if event.pending is not None:
                        yield from self._equal(name, "end", event.samples, done + event.pending)
                    else:
                        self.checked += 1
                        if done > event.samples:
                            yield f"{name}: {done} samples in rounds, {event.samples} computed"

    def _equal(self, name: str, where: str, computed: int, known: int) -> Iterator[str]:
        self.checked += 1
        if computed != known:
            yield f"{name}, {where}: computed {computed}, committed + lost + pending {known}"


def sums(entered: Mapping[int, int]) -> dict[int, int]:
    """Return the samples up to each round."""
    rounds = sorted(entered)
    return dict(zip(rounds, accumulate(entered[n] for n in rounds), strict=True))


def split_after(events: Iterable[Event], kind: type[Event]) -> Iterator[list[Event]]:
    """Yield the events in parts, each of which ends with an event of a kind, but for the last."""
    part: list[Event] = []
    for event in events:
        part.append(event)
        if isinstance(event, kind):
            yield part
            part = []
    yield part
