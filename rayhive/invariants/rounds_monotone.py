"""Invariant ``rounds_monotone``: round numbers increase."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

from rayhive.events import RolledBack, Round, StateLoaded, Transition, Weights
from rayhive.invariants.base import Invariant
from rayhive.timeline import Timeline


class RoundsMonotone(Invariant):
    """Rounds, transitions and fingerprints of an incarnation have increasing numbers.

    A peer that loads a state is at no earlier round afterwards. A late peer begins after the last
    round that another peer had finished when its process started; otherwise training was lost.
    Rounds that a return to a checkpoint undid (``rolled_back``) are left out of both; a peer goes
    on with the round after that of the checkpoint.
    """

    about = "The rounds of every peer only go up, and a joiner begins at the swarm's round."

    def check(self, log: Timeline) -> list[str]:
        """Return every decrease."""
        steps = (e for name in log.trained for e in log.of(Transition, name) if log.stands(e))
        done = sorted((event.t, event.round) for event in steps)
        times, rounds = [t for t, _ in done], list(accumulate((n for _, n in done), max))

        def finished(moment: float) -> int:
            """Return the last round that a peer had finished before a Unix time."""
            before = bisect_left(times, moment)
            return rounds[before - 1] if before else 0

        return [text for name in log.of_peers for text in self._of_incarnation(log, name, finished)]

    def _of_incarnation(
        self, log: Timeline, name: str, finished: Callable[[float], int]
    ) -> Iterator[str]:
        numbered: tuple[Sequence[Round | Transition | Weights], ...]
        numbered = (
            log.of(Round, name),
            log.of(Transition, name),
            log.of(Weights, name),
        )
        for events in numbered:
            self.checked += len(events)
            for before, after in pairwise(event for event in events if log.stands(event)):
                if after.round <= before.round:
                    yield f"{name}: {after.kind} {after.round} after {before.round}"
        for event in log.of(StateLoaded, name):
            self.checked += 1
            newest = max(event.round_before or 0, event.round_of_state or 0)
            if event.round < newest:
                yield f"{name}: at round {event.round} with a state, {newest} before"
        for back in log.of(RolledBack, name):
            self.checked += 1
            following = (e.round for e in log.of(Transition, name) if e.t > back.t)
            if (first := next(following, back.round + 1)) != back.round + 1:
                yield f"{name}: round {first} after a return to round {back.round}"
        yield from self._beginning(log, name, finished)

    def _beginning(
        self, log: Timeline, name: str, finished: Callable[[float], int]
    ) -> Iterator[str]:
        peer, steps = log.incarnations[name], log.of(Transition, name)
        if not peer.joined(log.spec.swarm.peers) or peer.spawned is None or not steps:
            return
        self.checked += 1
        done = finished(peer.spawned)
        if steps[0].round <= done:
            yield f"{name}: came when round {done} was done and began with {steps[0].round}"
