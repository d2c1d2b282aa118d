"""Rows and events of a run as data frames; pandas is imported when the first one is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayhive.columns import BOUNDS, ColumnType, Row, configuration_columns, replicate_columns
from rayhive.errors import DamagedError
from rayhive.metrics.logs import read_timelines

if TYPE_CHECKING:
    from pandas import DataFrame

#: Nullable types of pandas.
_DTYPES: dict[ColumnType, str] = {
    "text": "string",
    "count": "Int64",
    "float": "Float64",
    "flag": "boolean",
}
#: First columns of the frame of events.
_EVENT_COLUMNS = ("trial", "replicate", "scenario", "attempt", "t", "kind", "peer")


def configuration_types() -> dict[str, ColumnType]:
    """Return the columns of ``configurations.parquet``, CSV and JSON in order, and their types."""
    types: dict[str, ColumnType] = {}
    for column in configuration_columns():
        types[column.name] = column.folded_type
        if column.interval:
            types |= dict.fromkeys((column.name + end for end in BOUNDS), "float")
    return types


def configuration_frame(rows: Iterable[Row]) -> DataFrame:
    """Return folded rows as a data frame with nullable types."""
    return _frame(rows, configuration_types())


def replicate_frame(rows: Iterable[Row]) -> DataFrame:
    """Return replicates' rows as a data frame with nullable types."""
    return _frame(rows, {column.name: column.type for column in replicate_columns()})


def _frame(rows: Iterable[Row], types: Mapping[str, ColumnType]) -> DataFrame:
    import pandas as pd

    values = [{name: row[name] for name in types} for row in rows]
    dtypes = {name: _DTYPES[kind] for name, kind in types.items()}
    return pd.DataFrame(values, columns=list(types), dtype=object).astype(dtypes)


def event_frame(folder: str | Path) -> DataFrame:
    """Return the events of every attempt at every replicate, one row each.

    Args:
        folder: A run folder, or the folder of one replicate. Damaged logs are left out.

    Returns:
        The events in the order of trials, scenarios, replicates and attempts. The first columns
        are ``trial``, ``replicate``, ``scenario``, ``attempt``, ``t``, ``kind`` and ``peer``. Every
        other field of an event is a further column; fields that an event lacks are empty.
    """
    import pandas as pd

    rows = list(_event_rows(Path(folder)))
    names = dict.fromkeys((*_EVENT_COLUMNS, *(name for row in rows for name in row)))
    return pd.DataFrame(rows, columns=list(names))


def _event_rows(folder: Path) -> Iterator[dict[str, Any]]:
    trials = folder / "trials"
    places = [folder]
    if trials.is_dir():
        places = sorted(trials.glob("*/*/"), key=lambda path: (int(path.parent.name), path.name))
    for place in places:
        with suppress(DamagedError):
            for timeline in read_timelines(place):
                spec = timeline.spec
                head = {
                    "trial": spec.trial,
                    "replicate": spec.replicate,
                    "scenario": spec.scenario,
                    "attempt": spec.attempt,
                }
                yield from ({**head, **dict(event)} for event in timeline.events)
