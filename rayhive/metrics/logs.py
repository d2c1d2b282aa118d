"""Logs of a replicate's folder, one timeline for each attempt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from rayhive.errors import DamagedError
from rayhive.events import Event, ReplicateStarted, of_kind, read_events
from rayhive.metrics.clocks import on_one_clock
from rayhive.spec.replicate import ReplicateSpec
from rayhive.timeline import UNCOUNTED, Timeline


def read_timelines(folder: str | Path) -> Iterator[Timeline]:
    """Yield every attempt in a replicate's folder, the oldest first.

    ``events.jsonl`` holds the latest attempt, ``events.attempt-N.jsonl`` the earlier ones. Each
    ``replicate_started`` event begins an attempt and carries its spec; a log that ends before such
    an event belongs to ``spec.json``. All times are on the clock of the supervisor
    (:func:`rayhive.metrics.clocks.clocks_of`).

    Raises:
        DamagedError: A file cannot be read, or the spec is missing; raised after the readable
            attempts.
    """
    folder = Path(folder)
    logs = sorted(folder.glob("events.attempt-*.jsonl"), key=lambda log: (len(log.name), log.name))
    if (latest := folder / "events.jsonl").exists():
        logs.append(latest)
    damage: DamagedError | None = None
    if not logs:
        yield Timeline(_spec(folder, None, []), [])
    for log in logs:
        try:
            read = [
                on_one_clock(Timeline(_spec(folder, log, events), events, log))
                for events in _segments(log)
            ]
        except DamagedError as error:
            damage = damage or error
            continue
        except (LookupError, ValueError, ArithmeticError) as error:
            damage = damage or DamagedError(log, f"its clocks can't be compared: {error!r}")
            continue
        yield from read
    if damage is not None:
        raise damage


def last_timeline(folder: str | Path) -> Timeline:
    """Return the last finished attempt in a replicate's folder, or else the last one.

    Raises:
        DamagedError: No attempt can be read.
    """
    return _last(_readable(folder))


def timeline_of_row(folder: str | Path, row: Mapping[str, object]) -> Timeline:
    """Return the attempt that a row was computed from.

    The folder can hold attempts with other code, which have rows of their own.

    Raises:
        DamagedError: The attempt cannot be read.
    """
    found = [
        attempt
        for attempt in _readable(folder)
        if (attempt.spec.attempt, attempt.spec.code) == (row["attempt"], row["code"])
    ]
    if not found:
        raise DamagedError(Path(folder), f"it has no attempt {row['attempt']} any more")
    return _last(found)


def _readable(folder: str | Path) -> list[Timeline]:
    """Return the attempts that can be read, the oldest first; raise DamagedError if none can."""
    found: list[Timeline] = []
    try:
        found.extend(read_timelines(folder))
    except DamagedError:
        if not found:
            raise
    return found


def _last(attempts: Sequence[Timeline]) -> Timeline:
    numbered = enumerate(attempts)
    return max(numbered, key=lambda item: (item[1].state not in UNCOUNTED, item[0]))[1]


def _segments(log: Path) -> list[list[Event]]:
    """Return the events of a log, split at the beginning of each attempt."""
    segments: list[list[Event]] = [[]]
    for event in read_events(log):
        if isinstance(event, ReplicateStarted) and segments[-1]:
            segments.append([])
        segments[-1].append(event)
    return segments


def _spec(folder: Path, log: Path | None, events: list[Event]) -> ReplicateSpec:
    """Return the spec in the events of an attempt, or else in ``spec.json``."""
    started = next(of_kind(events, ReplicateStarted), None)
    path = log if started is not None and log is not None else folder / "spec.json"
    try:
        if started is not None:
            return ReplicateSpec.model_validate(started.spec)
        return ReplicateSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DamagedError(path, f"the spec of the replicate cannot be read: {error}") from error
    except ValidationError as error:
        first = str(error).splitlines()[0]
        raise DamagedError(path, f"not a replicate's specification: {first}") from error
