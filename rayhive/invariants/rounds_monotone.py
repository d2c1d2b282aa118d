"""Invariant ``rounds_monotone``: round numbers increase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rayhive.events import Event
from rayhive.invariants.base import Invariant, RunLog
from rayhive.spec.replicate import ReplicateSpec


class RoundsMonotone(Invariant):
    """Rounds, transitions and fingerprints of an incarnation have increasing numbers.

    A peer that loads a state is at no earlier round afterwards. A late peer begins after the last
    round that another peer had finished when its process started; otherwise training was lost.
    """

    about = "The rounds of every peer only go up, and a joiner begins at the swarm's round."

    def check(self, spec: ReplicateSpec, events: Sequence[Event]) -> list[str]:
        """Return every decrease."""
        log = RunLog(spec, events)
        return [text for name in log.peers for text in self._of_incarnation(log, name)]

    def _of_incarnation(self, log: RunLog, name: str) -> Iterator[str]:
        for kind in ("round", "transition", "weights"):
            rounds = [event["round"] for event in log.of(name, kind)]
            self.checked += len(rounds)
            for before, after in pairwise(rounds):
                if after <= before:
                    yield f"{name}: {kind} {after} after {before}"
        for event in log.of(name, "state_loaded"):
            self.checked += 1
            newest = max(event["round_before"], event["round_of_state"])
            if event["round"] < newest:
                yield f"{name}: at round {event['round']} with a state, {newest} before"
        yield from self._beginning(log, name)

    def _beginning(self, log: RunLog, name: str) -> Iterator[str]:
        spawned, steps = log.moment(name, "peer_spawned"), log.of(name, "transition")
        if not log.joined(name) or spawned is None or not steps:
            return
        self.checked += 1
        done = max(
            (
                event["round"]
                for other in log.trained
                for event in log.of(other, "transition")
                if event["t"] < spawned
            ),
            default=0,
        )
        if steps[0]["round"] <= done:
            yield f"{name}: came when round {done} was done and began with {steps[0]['round']}"
