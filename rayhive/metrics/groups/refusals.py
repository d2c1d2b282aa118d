"""Refusals: tensors that the outlier filter kept out of the averages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rayhive.columns import Column, Row, in_group
from rayhive.events import DHTReady, Event, Rejected, TrainingStarted, of_kind
from rayhive.metrics.folds import Reduced, add_counts, counts_text
from rayhive.metrics.group import MetricGroup, total
from rayhive.timeline import Timeline


@dataclass(frozen=True)
class RefusedTensors:
    """Tensors of one peer that its group refused in one round.

    Attributes:
        offender: Name of the peer that sent them; its peer_id if no event names it.
        round: Number of the round.
        tensors: ``gradients``, ``parameters`` or ``state``.
        reason: Reason given in the first ``rejected`` event.
        t: Unix time of that event [s].
    """

    offender: str
    round: int
    tensors: str
    reason: str
    t: float


class Refusals(MetricGroup):
    """Columns of the refusals. None if training never started.

    * ``rejected``: distinct (peer, round, kind of tensors) in ``rejected`` events. Every member of
      a group reports the same refusal, which counts once.
    * ``rejected_peers``: the same by peer, for example ``peer-2 153``. None without a refusal.
    """

    columns = in_group(
        "communication",
        total("rejected", "Refused gradients, parameters and states"),
        Column(
            "rejected_peers",
            "Peers that sent them, with counts",
            type="text",
            fold=Reduced(add_counts),
        ),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        if timeline.first(TrainingStarted) is None:
            return dict.fromkeys(self.names("replicate"))
        found = refusals(timeline.events)
        counts = Counter(item.offender for item in found)
        return {"rejected": len(found), "rejected_peers": counts_text(counts)}


def refusals(events: Sequence[Event]) -> list[RefusedTensors]:
    """Return every refusal once, in the order of time."""
    names = {event.peer_id: event.peer for event in of_kind(events, DHTReady)}
    found: dict[tuple[str, int, str], RefusedTensors] = {}
    for event in sorted(of_kind(events, Rejected), key=lambda event: event.t):
        if event.offender is None or event.round is None:
            continue
        offender = names.get(event.offender) or event.offender
        # logs of earlier versions lack the kind of tensors
        tensors, reason = event.tensors or "gradients", event.reason or "unknown"
        item = RefusedTensors(offender, event.round, tensors, reason, event.t)
        found.setdefault((offender, event.round, tensors), item)
    return list(found.values())
