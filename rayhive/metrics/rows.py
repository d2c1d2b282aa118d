"""From the folders of replicates to rows of ``trials.parquet``, compared with their twins."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rayhive.columns import Row, is_metric
from rayhive.errors import DamagedError
from rayhive.events import ReplicateStarted
from rayhive.metrics.logs import read_timelines
from rayhive.metrics.row_cache import RowCache
from rayhive.registry import METRICS
from rayhive.spec.study import BASELINE_SETTINGS
from rayhive.timeline import FINISHED, UNCOUNTED, UNFINISHED, UNKNOWN, Timeline

#: Scenario without faults; every other scenario is compared with it.
NO_FAULTS = "none"
#: Fingerprints of the user's code, None for none.
Codes: TypeAlias = Collection[str | None]
#: Fields of a spec that may differ between attempts at the same replicate: a study can get more
#: trials, or continue with other code.
_NOT_IDENTITY: dict[str, Any] = {
    "trial": True,
    "attempt": True,
    "folder": True,
    "directory": True,
    "git_revision": True,
    "timeouts": True,
    "preemption": True,
    "early_stop": True,
    "budget": {"trials"},
}


def place_of(row: Row) -> Path:
    """Return the folder of a replicate, relative to its run folder."""
    trial = row["trial"] if row["baseline"] is None else row["baseline"]
    return Path("trials", str(trial), f"r{row['replicate']}-{row['scenario']}")


@dataclass(frozen=True)
class Attempt:
    """One attempt at a replicate.

    Attributes:
        identity: Equal for all attempts at a replicate, whatever their trial: a trial that runs
            again after the driver died may get a new number.
        rank: Of several attempts the one with the highest rank counts: the last finished one (a
            stopped attempt has not finished), else the last lost or skipped one, else the last one.
        row: All columns.
        twin: Identity of the no-fault replicate with the same configuration and seed. None for a
            replicate of the scenario without faults.
    """

    identity: str
    rank: tuple[int, int, float]
    row: Row
    twin: str | None = None


def replicate_row(folder: str | Path, codes: Codes = ()) -> Row:
    """Return the row of the replicate whose events are in ``folder``.

    Of several attempts, the row is that of the last finished one.

    Args:
        folder: The folder.
        codes: As for :func:`last_attempt`.

    Raises:
        DamagedError: The events or the spec cannot be read.
    """
    return last_attempt(folder, codes).row


def last_attempt(folder: str | Path, codes: Codes = ()) -> Attempt:
    """Return the attempt in a replicate's folder that has the highest rank.

    Args:
        folder: The folder.
        codes: Fingerprints of the user's code. If there are attempts with one of them, only those
            count.

    Raises:
        DamagedError: The events or the spec cannot be read.
    """
    found = list(read_attempts(folder))
    of_code = [attempt for attempt in found if attempt.row["code"] in codes]
    return max(of_code or found, key=lambda attempt: attempt.rank)


def read_attempts(folder: str | Path) -> Iterator[Attempt]:
    """Yield the attempts in a replicate's folder, usually one.

    Once the last of them has ended, they are kept in :mod:`rayhive.metrics.row_cache`.

    Raises:
        DamagedError: Some events or the spec cannot be read; raised after the readable attempts.
    """
    cache = RowCache(Path(folder))
    kept = cache.read()
    if kept is not None:
        yield from (_restored(stored) for stored in kept)
        return
    found = []
    for attempt in _computed_attempts(folder):
        found.append(attempt)
        yield attempt
    if found and found[-1].row["state"] != UNFINISHED:
        cache.write([{**vars(attempt), "rank": list(attempt.rank)} for attempt in found])


def is_measured(folder: str | Path) -> bool:
    """Return whether the rows of this content are kept: every log was then read without damage."""
    return RowCache(Path(folder)).read() is not None


def _restored(stored: Mapping[str, Any]) -> Attempt:
    finished, attempt, started = stored["rank"]
    return Attempt(stored["identity"], (finished, attempt, started), stored["row"], stored["twin"])


def _computed_attempts(folder: str | Path) -> Iterator[Attempt]:
    damage: DamagedError | None = None
    for timeline in read_timelines(folder):
        try:
            attempt = _attempt(timeline)
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            # An event lacks a field or has an impossible value: no number of this log counts.
            reason = f"its events can't be measured: {error!r}"
            damage = damage or DamagedError(timeline.log or Path(folder), reason)
            damage.__cause__ = error
            continue
        yield attempt
    if damage is not None:
        raise damage


def _attempt(timeline: Timeline) -> Attempt:
    started = timeline.first(ReplicateStarted)
    spec = timeline.spec.model_dump(mode="json", exclude=_NOT_IDENTITY)
    for key, baseline in BASELINE_SETTINGS.items():
        if timeline.spec.baseline != baseline:  # its settings may be given when it is added
            del spec[key]
    # without faults, an empty plan is equal to none
    calm = json.dumps({**spec, "scenario": NO_FAULTS, "plan": None}, sort_keys=True)
    faulted = timeline.spec.scenario != NO_FAULTS
    return Attempt(
        identity=json.dumps(spec, sort_keys=True) if faulted else calm,
        rank=(
            0 if timeline.state in UNCOUNTED else 1 if timeline.state in UNKNOWN else 2,
            timeline.spec.attempt,
            started.t if started is not None else 0.0,
        ),
        row=timeline_row(timeline),
        twin=calm if faulted else None,
    )


def timeline_row(timeline: Timeline) -> Row:
    """Return every column of one attempt; columns that compare it with its twin are None.

    Raises:
        AssertionError: A metric group returned other columns than it declares.
    """
    row: Row = {}
    for name, group in METRICS.items():
        values = group().compute(timeline)
        declared = group.names("replicate")
        fixed = {column for column in values if not is_metric(column)}
        if fixed != set(declared):
            differing = ", ".join(sorted(fixed ^ set(declared)))
            raise AssertionError(
                f"metric group {name!r} must compute the columns that it declares: {differing}"
            )
        row |= values | dict.fromkeys(group.names("twin"))
    return row


def rows_with_twins(attempts: Iterable[Attempt]) -> list[Row]:
    """Return the rows of attempts with the columns of stage ``twin``.

    The columns stay None without a finished twin, and for the scenario without faults.

    Args:
        attempts: One attempt for each replicate.
    """
    attempts = list(attempts)
    twins = {
        attempt.identity: attempt.row
        for attempt in attempts
        if attempt.twin is None and attempt.row["state"] in FINISHED
    }
    rows = []
    for attempt in attempts:
        row, twin = dict(attempt.row), twins.get(attempt.twin or "")
        if twin is not None:
            for _, group in METRICS.items():
                row |= group().compare(attempt.row, twin)
        rows.append(row)
    return rows
