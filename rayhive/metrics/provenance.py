"""Provenance: code, packages, machines and times of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import ClassVar

from rayhive.columns import Column, Row, in_group
from rayhive.events import Event
from rayhive.metrics.folds import Common, Extreme
from rayhive.metrics.group import MetricGroup
from rayhive.metrics.timeline import Timeline


class Provenance(MetricGroup):
    """Columns about the origin of the numbers.

    * ``git_revision``: of the driver's code; None if that is no checkout.
    * ``code``: fingerprint of the user's code and data; None if there is neither.
    * ``versions``: ``name version`` of the important packages, as reported by the supervisor, or
      else by the peers.
    * ``hardware``: of the machines, from the same source; several are joined.
    * ``started``, ``ended``: UTC time of the supervisor's first and last event. ``ended`` is None
      until the replicate has ended.
    """

    columns: ClassVar[tuple[Column, ...]] = in_group(
        "provenance",
        Column(
            "git_revision", "Revision of rayhive's code", type="text", fold=Common(), in_table=False
        ),
        Column(
            "code",
            "Fingerprint of the user's code and data",
            type="text",
            fold=Common(),
            tells_apart=True,
            in_table=False,
        ),
        Column(
            "versions",
            "Versions of the important packages",
            type="text",
            fold=Common(),
            in_table=False,
        ),
        Column("hardware", "Machines of the run", type="text", fold=Common(), in_table=False),
        Column(
            "started",
            "Start of the first replicate (UTC)",
            type="text",
            fold=Extreme(min, failed=True),
            in_table=False,
        ),
        Column(
            "ended",
            "End of the last replicate (UTC)",
            type="text",
            fold=Extreme(max, failed=True),
            in_table=False,
        ),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        started = timeline.of("replicate_started")[:1]
        ended = timeline.of("replicate_finished")[-1:]
        ready = timeline.of("peer_ready")
        return {
            "git_revision": timeline.spec.git_revision,
            "code": timeline.spec.code,
            "versions": _text(started, "versions") or _text(ready, "versions"),
            "hardware": _text(started, "hardware") or _text(ready, "hardware"),
            "started": _utc(started),
            "ended": _utc(ended),
        }


def _text(events: Iterable[Event], field: str) -> str | None:
    found = sorted({_flat(event[field]) for event in events if event.get(field)})
    return "; ".join(found) or None


def _flat(value: str | Mapping[str, str | None]) -> str:
    if isinstance(value, str):
        return value
    return ", ".join(f"{name} {version}" for name, version in value.items() if version)


def _utc(events: Iterable[Event]) -> str | None:
    for event in events:
        moment = datetime.fromtimestamp(event["t"], tz=timezone.utc)
        return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
    return None
