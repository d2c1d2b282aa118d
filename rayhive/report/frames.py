"""Data frames of results, with column types that do not depend on what is in them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayhive.columns import COLUMNS, FOLDED_ONLY, REPLICATE_COLUMNS
from rayhive.metrics import METRICS
from rayhive.metrics.aggregate import ADDED_UP, EXTRA_COLUMNS
from rayhive.metrics.faults import TIMES
from rayhive.metrics.group import Row

if TYPE_CHECKING:
    from pandas import DataFrame

    from rayhive.report.results import Results

_TEXTS = frozenset(
    {
        "configuration",
        "scenario",
        "workload",
        "data",
        "codec",
        "delay",
        "link",
        "state",
        "stop_reason",
        "git_revision",
        "code",
        "versions",
        "hardware",
        "started",
        "ended",
        "rejected_peers",
        *(f"{name}_s" for name in TIMES),
    }
)
_COUNTS = frozenset(
    {
        "trial",
        "replicate",
        "seed",
        "attempt",
        "threshold",
        "powersgd_rank",
        "peers",
        "n",
        "n_failed",
        "n_lost",
        "n_timed_out",
        "rounds_complete",
        *ADDED_UP,
    }
)
_FLAGS = frozenset({"pareto", "payload_matches"})


def configuration_columns() -> tuple[str, ...]:
    """Return the columns of ``configurations.parquet``, the CSV and the JSON, in their order."""
    names: list[str] = []
    for column in COLUMNS:
        names.append(column.name)
        if column.interval:
            names += [f"{column.name}_low", f"{column.name}_high"]
    return (*names, *EXTRA_COLUMNS)


def replicate_columns() -> tuple[str, ...]:
    """Return the columns of ``trials.parquet`` in their order."""
    names = [column.name for column in COLUMNS if column.name not in FOLDED_ONLY]
    extra = [name for _, group in METRICS.items() for name in group.replicate_columns]
    return (*REPLICATE_COLUMNS, *names, *extra)


def configuration_frame(rows: Iterable[Row]) -> DataFrame:
    """Return folded rows as a data frame with nullable types."""
    return _frame(rows, configuration_columns(), {"reached": "Int64"})


def replicate_frame(rows: Iterable[Row]) -> DataFrame:
    """Return replicates' rows as a data frame with nullable types."""
    types = {"reached": "boolean", "samples_to_target": "Int64"}
    return _frame(rows, replicate_columns(), types)


def _frame(rows: Iterable[Row], names: Sequence[str], types: dict[str, str]) -> DataFrame:
    import pandas as pd

    values = [{name: row[name] for name in names} for row in rows]
    kinds = {name: types.get(name, _type(name)) for name in names}
    return pd.DataFrame(values, columns=list(names), dtype=object).astype(kinds)


def _type(name: str) -> str:
    if name in _TEXTS:
        return "string"
    if name in _COUNTS:
        return "Int64"
    return "boolean" if name in _FLAGS else "Float64"


def write_parquet(results: Results, folder: str | Path) -> None:
    """Write ``trials.parquet`` and ``configurations.parquet``, each whole or not at all."""
    for name, frame in (
        ("trials.parquet", results.replicates),
        ("configurations.parquet", results.configurations),
    ):
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        os.close(handle)
        try:
            frame.to_parquet(temporary, index=False)
            os.chmod(temporary, 0o644)
            os.replace(temporary, Path(folder) / name)
        except BaseException:
            os.unlink(temporary)
            raise
