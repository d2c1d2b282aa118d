"""Samples by outcome: committed, pending or lost."""

from __future__ import annotations

from dataclasses import dataclass

from rayhive.metrics.timeline import Timeline


@dataclass(frozen=True)
class Samples:
    """Samples of one peer.

    Attributes:
        computed: Samples that it is known to have computed.
        committed: Samples that entered an applied round.
        pending: Samples on their way into a round when training ended; None if the peer did not
            report them.
    """

    computed: int
    committed: int
    pending: int | None

    @property
    def lost(self) -> int | None:
        """Samples that were discarded, or lost with their peer; None if ``pending`` is."""
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
    """Return the lost samples of the swarm: computed less committed less pending.

    Samples that were pending when training ended are not lost, because a run is as long as its
    budget. A killed peer has no pending samples, and those that it computed after its last report
    are unknown; peers report at every transition, and in between with ``progress``. None if a peer
    that finished did not report its pending samples.
    """
    if timeline.span is None:
        return None
    if timeline.spec.swarm.use_local_updates:
        return 0
    lost = [samples.lost for samples in samples_by_peer(timeline).values()]
    return sum(item for item in lost if item is not None) if None not in lost else None


def _pending(timeline: Timeline, name: str) -> int | None:
    end = timeline.incarnations[name].end
    if end != "peer_finished":
        return None if end is None else 0  # a peer that left has reported its lost samples
    ended = [event for event in timeline.of("peer_finished") if event["peer"] == name]
    pending = ended[-1].get("pending")
    return None if pending is None else int(pending)
