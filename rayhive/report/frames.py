"""Data frames of the results, with column types that do not depend on the values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rayhive.columns import BOUNDS, ColumnType, Row, configuration_columns, replicate_columns
from rayhive.files import replaced

if TYPE_CHECKING:
    from pandas import DataFrame

    from rayhive.report.results import Results

#: Nullable types of pandas.
_DTYPES: dict[ColumnType, str] = {
    "text": "string",
    "count": "Int64",
    "float": "Float64",
    "flag": "boolean",
}


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


def write_parquet(results: Results, folder: str | Path) -> None:
    """Write ``trials.parquet`` and ``configurations.parquet``, each in one step."""
    for name, frame in (
        ("trials.parquet", results.replicates),
        ("configurations.parquet", results.configurations),
    ):
        with replaced(Path(folder) / name, durable=False, mode=0o644) as new:
            frame.to_parquet(new, index=False)
