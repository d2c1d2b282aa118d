"""Attempts at a replicate, as its folder keeps them: finished, lost, archived or damaged.

The log of the current attempt is ``events.jsonl``. Those of earlier attempts lie beside it, as
``events.attempt-N.jsonl``, as ``events.damaged-N.jsonl`` if they cannot be read, or as
``events.mended-N.jsonl`` if they failed for a cause that was then removed.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from rayhive.errors import DamagedError
from rayhive.events import (
    Event,
    EventLog,
    OutcomeFound,
    ReplicateFinished,
    is_held,
    of_kind,
    read_events,
)
from rayhive.metrics.rows import is_measured
from rayhive.spec.replicate import ReplicateSpec
from rayhive.timeline import LOST

E = TypeVar("E", bound=Event)

SPEC = "spec.json"
EVENTS = "events.jsonl"
_LOG = re.compile(r"events(?:\.(?:attempt|damaged|mended)-(\d+))?\.jsonl")


def current_attempt(folder: Path) -> int:
    """Return the number of the current attempt in a replicate's folder."""
    found = [_LOG.fullmatch(item.name) for item in folder.glob("events.*-*.jsonl")]
    return max((int(match[1]) for match in found if match), default=-1) + 1


def is_being_written(folder: Path) -> bool:
    """Return whether a living process writes the log of the current attempt."""
    return is_held(folder / EVENTS)


def archive(folder: Path, as_: str = "attempt") -> None:
    """Rename the files of the current attempt to make room for a further one.

    Args:
        folder: The replicate's folder.
        as_: ``attempt`` for an attempt that stays among the results, ``damaged`` for one that
            cannot be read, ``mended`` for one that failed for a cause that was removed. Results
            contain neither of the last two.
    """
    attempt = current_attempt(folder)
    if not (folder / EVENTS).exists():
        return
    # The log is renamed last: until then this attempt is still the current one.
    for name, kind in (("logs", "attempt"), (EVENTS, as_)):
        stem, dot, ending = name.partition(".")
        target = folder / f"{stem}.{kind}-{attempt}{dot}{ending}"
        if (folder / name).exists() and not target.exists():
            (folder / name).rename(target)


def set_aside(file: Path) -> Path:
    """Rename a damaged file, so that it is not read again, and return its new path.

    The log of an attempt keeps its number, which the next attempt does not reuse.
    """
    if file.name == EVENTS:
        new = file.with_name(f"events.damaged-{current_attempt(file.parent)}.jsonl")
        archive(file.parent, "damaged")
        return new
    match = _LOG.fullmatch(file.name)
    count = len(list(file.parent.glob(f"{file.stem}.damaged-*{file.suffix}")))
    stem, number = (file.stem, count) if match is None else ("events", match[1])
    new = file.with_name(f"{stem}.damaged-{number}{file.suffix}")
    file.rename(new)
    return new


def read_spec(folder: Path) -> ReplicateSpec:
    """Return the spec of the replicate in ``folder``.

    Raises:
        OSError: There is none, or it cannot be read.
        ValueError: It is not valid.
    """
    return ReplicateSpec.model_validate_json((folder / SPEC).read_bytes())


def finished_event(folder: Path) -> ReplicateFinished | None:
    """Return the last event of the replicate in ``folder``; None if it is unfinished or stopped.

    Raises:
        DamagedError: Its event log is damaged.
    """
    last = _last(folder / EVENTS, ReplicateFinished)
    return None if last is None or last.state == "stopped" else last


def is_stopped(folder: Path) -> bool:
    """Return whether the current attempt ended on request, which is neither a result nor a loss."""
    last = _last(folder / EVENTS, ReplicateFinished)
    return last is not None and last.state == "stopped"


def unfinished_outcome(folder: Path) -> OutcomeFound | None:
    """Return the outcome of a replicate whose supervisor died before its last event, if any."""
    log = folder / EVENTS
    return None if _last(log, ReplicateFinished) else _last(log, OutcomeFound)


def lost_attempts(folder: Path) -> int:
    """Return the number of attempts at a replicate that were lost to the infrastructure."""
    lost = 0
    for log in folder.glob("events*.jsonl"):
        with suppress(DamagedError, OSError):
            last = None if "damaged" in log.name else _last(log, ReplicateFinished)
            lost += last is not None and last.state == LOST
    return lost


def record_end(folder: Path, state: str, reason: str | None) -> ReplicateFinished:
    """Append ``replicate_finished`` to a log whose writer is gone, and return it."""
    end = ReplicateFinished(state=state, stop_reason=reason)
    log = EventLog(folder / EVENTS)
    log.append(end)
    log.close()
    return end


def _last(log: Path, record: type[E]) -> E | None:
    """Return the last event of a kind in a log, which need not exist."""
    if not log.exists():
        return None
    kind = record.model_fields["kind"].default if is_measured(log.parent) else None
    found = list(of_kind(read_events(log, kind), record))
    return found[-1] if found else None
