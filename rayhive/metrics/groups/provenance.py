"""Provenance: code, packages, machines and times of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from functools import partial
from typing import TypeAlias

from rayhive.columns import Column, Row, in_group
from rayhive.events import PeerReady, PeerSpawned, ReplicateFinished, ReplicateStarted
from rayhive.metrics.folds import Common, Reduced
from rayhive.metrics.group import MetricGroup
from rayhive.timeline import Timeline

#: Events that tell the versions and the hardware of a process.
_Facts: TypeAlias = Sequence[ReplicateStarted] | Sequence[PeerSpawned] | Sequence[PeerReady]
_text = partial(Column, type="text", fold=Common(), in_table=False)


class Provenance(MetricGroup):
    """Columns about the origin of the numbers.

    * ``git_revision``: of the driver's code; None if that is no checkout.
    * ``code``: fingerprint of the user's code and data; None if there is neither.
    * ``versions``: ``name version`` of the important packages where the peers run; several are
      joined. Old logs have those of the supervisor's machine only.
    * ``hardware``: of the machines, from the same source.
    * ``started``, ``ended``: UTC time of the supervisor's first and last event. ``ended`` is None
      until the replicate has ended.
    """

    columns = in_group(
        "provenance",
        _text("git_revision", "Revision of rayhive's code"),
        _text("code", "Fingerprint of the user's code and data", tells_apart=True, condition=True),
        _text("versions", "Versions of the important packages"),
        _text("hardware", "Machines of the run"),
        _text("started", "Start of the first replicate (UTC)", fold=Reduced(min, failed=True)),
        _text("ended", "End of the last replicate (UTC)", fold=Reduced(max, failed=True)),
    )

    def compute(self, timeline: Timeline) -> Row:
        """Return the group's columns of one replicate."""
        started, ended = timeline.of(ReplicateStarted)[:1], timeline.of(ReplicateFinished)[-1:]
        sources: list[_Facts] = [timeline.of(PeerSpawned), started, timeline.of(PeerReady)]
        return {
            "git_revision": timeline.spec.git_revision,
            "code": timeline.spec.code,
            "versions": next(filter(None, map(_versions, sources)), None),
            "hardware": next(filter(None, map(_hardware, sources)), None),
            "started": _utc(started[0].t) if started else None,
            "ended": _utc(ended[0].t) if ended else None,
        }


def _hardware(events: _Facts) -> str | None:
    """Return the machines, each once."""
    return _joined(event.hardware for event in events)


def _versions(events: _Facts) -> str | None:
    """Return the installed packages, each with its version."""
    versions = (event.versions or {} for event in events)
    return _joined(", ".join(f"{name} {v}" for name, v in each.items() if v) for each in versions)


def _joined(texts: Iterable[str | None]) -> str | None:
    return "; ".join(sorted({text for text in texts if text})) or None


def _utc(moment: float) -> str:
    text = datetime.fromtimestamp(moment, tz=timezone.utc).isoformat(timespec="seconds")
    return text.replace("+00:00", "Z")
