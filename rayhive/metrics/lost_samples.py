"""Where the samples went that peers computed."""

from __future__ import annotations

from dataclasses import dataclass

from rayhive.metrics.timeline import Timeline


@dataclass(frozen=True)
class Samples:
    """The samples of one peer.

    Attributes:
        computed: Those that it is known to have computed.
        committed: Those that entered a round that was applied.
        pending: Those that were on their way into a round when training ended; None if the peer
            did not say.
    """

    computed: int
    committed: int
    pending: int | None

    @property
    def lost(self) -> int | None:
        """Those that were thrown away, or died with their peer."""
        pending = self.pending
        return None if pending is None else max(0, self.computed - self.committed - pending)


def samples_by_peer(timeline: Timeline) -> dict[str, Samples]:
    """Return the samples of every peer that computed any, by name."""
    committed = dict.fromkeys(timeline.computed_by_peer, 0)
    for event in timeline.of("round"):
        if timeline.applied(event):
            committed[event["peer"]] += event["samples"]
    pending = {name: _pending(timeline, name) for name in committed}
    return {
        name: Samples(computed, committed[name], pending[name])
        for name, computed in timeline.computed_by_peer.items()
    }


def samples_lost(timeline: Timeline) -> int | None:
    """Return the samples that were computed and lost, over the swarm.

    Computed less committed less pending. What was pending when training ended is no loss: a run
    is as long as its budget. Of a peer that was killed nothing is pending, and what it computed
    after it last told its count is not known; it tells it at every transition, and in between
    with ``progress``. None where a peer that came to its end did not say what was pending.
    """
    if timeline.span is None:
        return None
    if timeline.spec.swarm.use_local_updates:
        return 0
    lost = [samples.lost for samples in samples_by_peer(timeline).values()]
    return sum(item for item in lost if item is not None) if None not in lost else None


def _pending(timeline: Timeline, name: str) -> int | None:
    end = timeline.lives[name].end
    if end != "peer_finished":
        return None if end is None else 0  # who leaves has said what was lost
    ended = [event for event in timeline.of("peer_finished") if event["peer"] == name]
    pending = ended[-1].get("pending")
    return None if pending is None else int(pending)
