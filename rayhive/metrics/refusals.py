"""Refusals: tensors that the outlier filter kept out of the averages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from rayhive.columns import Column, Row, in_group
from rayhive.events import Event
from rayhive.metrics.cell_text import counts_text
from rayhive.metrics.folds import AddedCounts, Total
from rayhive.metrics.group import MetricGroup
from rayhive.metrics.timeline import Timeline


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

    columns: ClassVar[tuple[Column, ...]] = in_group(
        "communication",
        Column("rejected", "Refused gradients, parameters and states", type="count", fold=Total()),
        Column(
            "rejected_peers", "Peers that sent them, with counts", type="text", fold=AddedCounts()
        ),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        if timeline.first("training_started") is None:
            return dict.fromkeys(self.names("replicate"))
        found = refusals(timeline.events)
        counts = Counter(item.offender for item in found)
        return {"rejected": len(found), "rejected_peers": counts_text(counts)}


def refusals(events: Iterable[Event]) -> list[RefusedTensors]:
    """Return every refusal once, in the order of time."""
    events = list(events)
    names = peer_names(events)
    found: dict[tuple[str, int, str], RefusedTensors] = {}
    reported = (event for event in events if event["kind"] == "rejected")
    for event in sorted(reported, key=lambda event: float(event["t"])):
        offender, round_ = event.get("offender"), event.get("round")
        if offender is None or round_ is None:
            continue
        name = names.get(str(offender), str(offender))
        # logs of earlier versions lack the kind of tensors
        tensors = event.get("tensors") or "gradients"
        item = RefusedTensors(name, round_, tensors, event.get("reason") or "unknown", event["t"])
        found.setdefault((name, round_, tensors), item)
    return list(found.values())


def peer_names(events: Iterable[Event]) -> dict[str, str]:
    """Return the name of each peer by its peer_id."""
    ready = (event for event in events if event["kind"] == "dht_ready" and event["peer"])
    return {str(event.get("peer_id")): str(event["peer"]) for event in ready}
