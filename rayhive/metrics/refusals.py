"""Refusals: what the outlier filter kept out of the averages, and whose it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from rayhive.events import Event
from rayhive.metrics.group import MetricGroup, Row
from rayhive.metrics.timeline import Timeline


@dataclass(frozen=True)
class RefusedTensors:
    """What one peer sent in one round, and its group refused.

    Attributes:
        offender: Name of the peer, or its peer_id if it is none of the replicate's.
        round: The round.
        tensors: ``gradients``, ``parameters`` or ``state``.
        reason: Why, as the first peer that said so told it.
        t: When that peer said so [s].
    """

    offender: str
    round: int
    tensors: str
    reason: str
    t: float


class Refusals(MetricGroup):
    """Columns of what was refused. None where training never started.

    * ``rejected``: distinct (peer, round, kind of tensors) of which any peer reported a
      ``rejected`` event: every member of a group reports the same refusal, which counts once.
    * ``rejected_peers``: the same by peer, for example ``peer-2 153``. None if nothing was refused.
    """

    columns: ClassVar[tuple[str, ...]] = ("rejected", "rejected_peers")

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        if timeline.first("training_started") is None:
            return dict.fromkeys(self.columns)
        found = refusals(timeline.events)
        counts = Counter(item.offender for item in found)
        return {"rejected": len(found), "rejected_peers": counts_text(counts)}


def refusals(events: Iterable[Event]) -> list[RefusedTensors]:
    """Return every refusal once, in the order of time."""
    events = list(events)
    names = peer_names(events)
    found: dict[tuple[str, int, str], RefusedTensors] = {}
    told = (event for event in events if event["kind"] == "rejected")
    for event in sorted(told, key=lambda event: float(event["t"])):
        offender, round_ = event.get("offender"), event.get("round")
        if offender is None or round_ is None:
            continue
        name = names.get(str(offender), str(offender))
        # logs of earlier versions do not say what was refused
        tensors = event.get("tensors") or "gradients"
        item = RefusedTensors(name, round_, tensors, event.get("reason") or "unknown", event["t"])
        found.setdefault((name, round_, tensors), item)
    return list(found.values())


def peer_names(events: Iterable[Event]) -> dict[str, str]:
    """Return the names of peers by their peer_id."""
    ready = (event for event in events if event["kind"] == "dht_ready" and event["peer"])
    return {str(event.get("peer_id")): str(event["peer"]) for event in ready}


def counts_text(counts: Mapping[str, int]) -> str | None:
    """Return counts as a text that :func:`add_counts` reads back, the largest first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered) or None


def add_counts(texts: Iterable[str]) -> str | None:
    """Return the sums of counts over several texts."""
    total: Counter[str] = Counter()
    for text in texts:
        for item in text.split(", "):
            name, _, count = item.rpartition(" ")
            total[name] += int(count)
    return counts_text(total)
