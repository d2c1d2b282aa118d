"""Comparison of a replicate with its twin: the same configuration and seed without faults."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rayhive.columns import Row
from rayhive.errors import DamagedError
from rayhive.metrics.rows import NO_FAULTS, Attempt, last_attempt
from rayhive.metrics.timeline import FINISHED
from rayhive.registry import METRICS


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
    return [_compared(attempt.row, twins.get(attempt.twin or "")) for attempt in attempts]


def compared_row(folder: str | Path) -> Row:
    """Return the row of a replicate, compared with its twin if that is in a folder beside it.

    A twin with damaged files is ignored.

    Raises:
        DamagedError: The events or the spec cannot be read.
    """
    attempt = last_attempt(folder)
    if attempt.twin is None:
        return attempt.row
    twins = []
    for place in sorted(Path(folder).parent.glob(f"*-{NO_FAULTS}")):
        with suppress(DamagedError):
            if (place / "events.jsonl").exists():
                twins.append(last_attempt(place))
    return rows_with_twins([attempt, *twins])[0]


def _compared(row: Row, twin: Row | None) -> Row:
    if twin is None:
        return row
    compared = dict(row)
    for _, group in METRICS.items():
        compared |= group().compare(row, twin)
    return compared
