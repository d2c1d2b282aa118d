"""Comparing a faulted replicate with its twin: the same configuration and seed, nothing broken."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rayhive.errors import DamagedError
from rayhive.metrics.group import Row, ratio
from rayhive.metrics.rows import NO_FAULTS, Attempt, read_attempts
from rayhive.metrics.timeline import FINISHED


def rows_with_twins(attempts: Iterable[Attempt]) -> list[Row]:
    """Return the attempts' rows with the columns that compare them with their twins.

    * ``loss_delta``: ``final_loss`` less the twin's.
    * ``convergence_penalty``: ``samples_to_target`` less the twin's.
    * ``retention``: ``samples_per_s`` / the twin's.
    * ``retention_normalised``: ``retention`` / ``live_share``.

    They stay None without a twin that finished, and in rows under which nothing was to be broken.

    Args:
        attempts: One attempt a replicate.
    """
    attempts = list(attempts)
    twins = {
        attempt.identity: attempt.row
        for attempt in attempts
        if attempt.twin is None and attempt.row["state"] in FINISHED
    }
    return [_compared(attempt.row, twins.get(attempt.twin or "")) for attempt in attempts]


def compared_row(folder: str | Path) -> Row:
    """Return the row of a replicate, compared with its twin if that lies in a folder beside it.

    A twin whose files are damaged is none.

    Raises:
        DamagedError: The events or the spec cannot be read.
    """
    mine = _counted(folder)
    if mine.twin is None:
        return mine.row
    beside = sorted(Path(folder).parent.glob(f"*-{NO_FAULTS}"))
    twins = []
    for place in beside:
        with suppress(DamagedError):
            if (place / "events.jsonl").exists():
                twins.append(_counted(place))
    return rows_with_twins([mine, *twins])[0]


def _counted(folder: str | Path) -> Attempt:
    return max(read_attempts(folder), key=lambda attempt: attempt.rank)


def _compared(row: Row, twin: Row | None) -> Row:
    if twin is None:
        return row
    retention = ratio(_number(row, "samples_per_s"), _number(twin, "samples_per_s"))
    return {
        **row,
        "loss_delta": _difference(row, twin, "final_loss"),
        "convergence_penalty": _difference(row, twin, "samples_to_target"),
        "retention": retention,
        "retention_normalised": ratio(retention, _number(row, "live_share")),
    }


def _number(row: Row, name: str) -> float | None:
    value = row[name]
    return value if isinstance(value, (int, float)) else None


def _difference(row: Row, twin: Row, name: str) -> float | None:
    mine, theirs = _number(row, name), _number(twin, name)
    return None if mine is None or theirs is None else mine - theirs
