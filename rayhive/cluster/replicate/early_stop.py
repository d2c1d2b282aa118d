"""Early end of a running replicate that learns more slowly than others."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rayhive.cluster.replicate.peer_table import Outcome
from rayhive.events import Evaluation, Event, Pruned
from rayhive.metrics.pruning import reason, verdict
from rayhive.spec.replicate import ReplicateSpec
from rayhive.timeline import Timeline


class EarlyStopWatch:
    """Compares the evaluations of a replicate with the bounds in its spec.

    Args:
        spec: The replicate; without bounds it is never stopped.
        training: Returns the names of the peers that train.
        stop: Receives the reason, once.
    """

    def __init__(
        self,
        spec: ReplicateSpec,
        training: Callable[[], Collection[str]],
        stop: Callable[[str], None],
    ) -> None:
        self._spec, self._training, self._stop = spec, training, stop
        self._pruned: Pruned | None = None
        self._events: list[Event] = []

    def heard(self, event: Event) -> Pruned | None:
        """Take an event of a peer; return the verdict if it stops the replicate now."""
        bounds = self._spec.early_stop
        if bounds is None or self._pruned is not None:
            return None
        self._events.append(event)
        if isinstance(event, Evaluation):
            timeline = Timeline(self._spec, self._events)
            self._pruned = verdict(timeline, bounds, self._training())
            if self._pruned is not None:
                self._stop(reason(self._pruned))
        return self._pruned

    def judged(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the replicate, or ``pruned`` if this watch stopped it."""
        why = None if self._pruned is None else reason(self._pruned)
        if outcome == Outcome("stopped", str(why)):
            return Outcome("pruned", outcome.stop_reason)
        return outcome
