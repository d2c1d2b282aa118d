"""Target of a running replicate: whether its peers have reached it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rayhive.events import Evaluation, Event, PeerReady
from rayhive.metrics.groups.convergence import is_at_target


class TargetWatch:
    """Compares the means of the peers' evaluations with the target, as the results do.

    Peers in pairs, and peers that average in the background, evaluate different parameters after
    one round: none of them can tell alone.

    Attributes:
        reached: Whether the mean over the peers that evaluated after one round was at the target.
    """

    def __init__(self) -> None:
        self.reached = False
        self._target: dict[str, Any] | None = None
        # Values after each round that some peer may still evaluate: round -> peer -> value.
        self._rounds: dict[int, dict[str, float | None]] = defaultdict(dict)

    def heard(self, name: str, event: Event, rounds: Mapping[str, int]) -> None:
        """Take an event of a peer.

        Args:
            name: The peer.
            event: The event.
            rounds: Last round of each peer that trains, this event included.
        """
        if isinstance(event, PeerReady):
            self._target = event.target or self._target
        target = self._target
        if target is None:
            return
        if isinstance(event, Evaluation) and not event.final:
            self._rounds[event.round][name] = event.values.get(target["metric"])
        # A peer that was late for a round does not evaluate after it.
        known = [
            round_
            for round_, values in self._rounds.items()
            if all(peer in values or last > round_ for peer, last in rounds.items())
        ]
        for values in map(self._rounds.pop, known):
            numbers = [value for value in values.values() if value is not None]
            if len(numbers) == len(values):
                self.reached = self.reached or is_at_target(target, fmean(numbers))
