"""Results of a run folder, computed from its events, as rows and as data frames.

pandas is imported when the first frame is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from rayhive.columns import (
    BOUNDS,
    ColumnType,
    Direction,
    Row,
    configuration_columns,
    is_metric,
    metric_columns,
    replicate_columns,
)
from rayhive.errors import ConfigError, DamagedError, Problem, nearest
from rayhive.files import replaced
from rayhive.metrics.aggregate import fold, rank_rows
from rayhive.metrics.logs import read_timelines
from rayhive.metrics.rows import Attempt, place_of, read_attempts, rows_with_twins
from rayhive.timeline import FINISHED

if TYPE_CHECKING:
    from pandas import DataFrame

#: Nullable types of pandas.
_DTYPES: dict[ColumnType, str] = {
    "text": "string",
    "count": "Int64",
    "float": "Float64",
    "flag": "boolean",
}
#: What becomes of a replicate with a damaged attempt.
_RUNS_AGAIN = "A further `rayhive sweep` runs that replicate again."
_REMAINS = "Another attempt at that replicate finished, and counts."
#: First columns of the frame of events.
_OF_REPLICATE = ("trial", "replicate", "scenario", "attempt")


@dataclass(frozen=True)
class Results:
    """Results of a study.

    Attributes:
        name: Name of the study.
        objectives: Column to direction; empty if the folder has no study.
        rows: One row for each replicate: its last finished attempt, or else its last attempt.
        by: Configuration columns that make a row of the table; empty for all of them.
        damaged: Error of each replicate with an attempt that could not be read and has no row, and
            what becomes of the replicate.
        wanted: Replicates of each row that the study asks for; None if it is not known.
    """

    name: str
    objectives: Mapping[str, str]
    rows: tuple[Row, ...]
    by: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    wanted: int | None = None

    @cached_property
    def folded(self) -> tuple[Row, ...]:
        """One row for each configuration and scenario, with the columns that compare rows."""
        rows = fold(self.rows, self.by, self.objectives)
        rank_rows(rows, self.objectives, self.by)
        return tuple(rows)

    @cached_property
    def replicates(self) -> DataFrame:
        """``rows`` as a data frame, the content of ``trials.parquet``."""
        return replicate_frame(self.rows)

    @cached_property
    def configurations(self) -> DataFrame:
        """``folded`` as a data frame, the content of ``configurations.parquet``."""
        return configuration_frame(self.folded)

    def write_parquet(self, folder: str | Path) -> None:
        """Write ``trials.parquet`` and ``configurations.parquet``, each in one step."""
        frames = {"trials": self.replicates, "configurations": self.configurations}
        for name, frame in frames.items():
            with replaced(Path(folder) / f"{name}.parquet", durable=False, mode=0o644) as new:
                frame.to_parquet(new, index=False)


def load_results(folder: str | Path) -> Results:
    """Read a run folder.

    The sources are ``sweep.yaml`` (name and objectives) and the replicates' specs and events, not
    the Parquet files. A replicate with damaged files is left out and listed in ``damaged``.

    Args:
        folder: The run folder, or the folder of one replicate, such as a replay's.

    Raises:
        ConfigError: ``folder`` is neither a run folder nor that of a replicate.
        DamagedError: ``sweep.yaml`` cannot be read.
    """
    folder = Path(folder)
    if not _is_run(folder) and not _is_replicate(folder):
        raise ConfigError(_no_run(folder))
    study = _study(folder)
    rows, damaged = _rows(folder)
    name = study.name or folder.resolve().name
    objectives = study.objectives or {}
    return Results(name, objectives, rows, damaged=damaged, wanted=study.replicates)


def _rows(folder: Path) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Return one row for each replicate, and the error of each unreadable one."""
    best: dict[str, Attempt] = {}
    damaged: list[str] = []
    for path in _replicate_folders(folder):
        if _is_replicate(path):
            finished = False
            try:
                for attempt in read_attempts(path):
                    rival = best.setdefault(attempt.identity, attempt)
                    best[attempt.identity] = max(rival, attempt, key=lambda item: item.rank)
                    finished = finished or attempt.row["state"] in FINISHED
            except DamagedError as error:
                damaged.append(f"{error}. {_REMAINS if finished else _RUNS_AGAIN}")
    rows = rows_with_twins(best.values())
    rows.sort(key=_position)
    return tuple(rows), tuple(damaged)


def _position(row: Row) -> tuple[int, str, str, int]:
    """Return the sort key of a replicate: trials by number, then baselines by name."""
    trial = row["trial"] if row["baseline"] is None else math.inf
    return trial, str(row["baseline"]), row["scenario"], row["replicate"]  # type: ignore[return-value]


def _replicate_folders(folder: Path) -> list[Path]:
    """Return the folders of a run's replicates, or the folder itself if it is no run.

    Raises:
        PermissionError: The folder may not be listed.
    """
    if not _is_run(folder):
        return [folder]
    trials = folder / "trials"
    outer = sorted(trials.iterdir()) if trials.is_dir() else []  # glob skips what it may not list
    inner = (path for trial in outer if trial.is_dir() for path in trial.iterdir())
    return sorted(path for path in inner if path.is_dir())


def replicate_place(folder: Path, row: Row) -> Path:
    """Return the folder of a replicate.

    Args:
        folder: The run folder, or the folder of the replicate.
        row: Its row.
    """
    return folder / place_of(row) if (folder / "trials").is_dir() else folder


class _Study(BaseModel):
    """Fields of ``sweep.yaml`` that results need."""

    name: str | None = None
    replicates: int | None = None
    objectives: dict[str, Direction] | None = None


def _study(folder: Path) -> _Study:
    path = folder / "sweep.yaml"
    if not path.exists():
        return _Study()
    try:
        return _Study.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        text = "not the study of this run: its name, objectives and replicates can't be read"
        raise DamagedError(path, text) from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DamagedError(path, f"not the study of this run: {error}") from error


def _is_run(folder: Path) -> bool:
    return (folder / "sweep.yaml").is_file() or (folder / "trials").is_dir()


def _is_replicate(folder: Path) -> bool:
    return (folder / "spec.json").is_file() or (folder / "events.jsonl").is_file()


def _no_run(folder: Path) -> Problem:
    """Return the error for a folder without a run; it lists the runs nearby."""
    places = (folder, folder.parent, Path("runs"))
    near = (path for place in places if place.is_dir() for path in sorted(place.iterdir()))
    runs = {path.name: str(path) for path in near if _is_run(path)}
    close = nearest(folder.name, list(runs))
    listed = f"; there are {', '.join(sorted(runs.values()))}" if runs else ""
    allowed = f"a run folder, with a sweep.yaml or trials in it, or a replicate's{listed}"
    return Problem("DIR", str(folder), allowed, None if close is None else runs[close])


# -- data frames -------------------------------------------------------------------------------


def configuration_types(rows: Iterable[Row] = ()) -> dict[str, ColumnType]:
    """Return the columns of ``configurations.parquet``, CSV and JSON in order, and their types.

    Args:
        rows: Folded rows; the metrics of their workloads are columns, too.
    """
    types: dict[str, ColumnType] = {}
    for column in configuration_columns(metric_columns(rows)):
        types[column.name] = column.folded_type
        if column.interval:
            types |= dict.fromkeys((column.name + end for end in BOUNDS), "float")
    return types


def configuration_frame(rows: Iterable[Row]) -> DataFrame:
    """Return folded rows as a data frame with nullable types."""
    rows = list(rows)
    return _frame(rows, configuration_types(rows))


def replicate_frame(rows: Iterable[Row]) -> DataFrame:
    """Return replicates' rows as a data frame with nullable types."""
    rows = list(rows)
    columns = replicate_columns(metric_columns(rows))
    return _frame(rows, {column.name: column.type for column in columns})


def _frame(rows: Iterable[Row], types: Mapping[str, ColumnType]) -> DataFrame:
    import pandas as pd

    values = [
        {name: row.get(name) if is_metric(name) else row[name] for name in types} for row in rows
    ]
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

    places = _replicate_folders(Path(folder))
    rows: list[dict[str, Any]] = []
    for place in sorted(places, key=lambda path: (path.parent.name.zfill(9), path.name)):
        with suppress(DamagedError):
            for timeline in read_timelines(place):
                head = timeline.spec.model_dump(include=set(_OF_REPLICATE))
                rows += ({**head, **dict(event)} for event in timeline.events)
    names = dict.fromkeys((*_OF_REPLICATE, "t", "kind", "peer", *(n for row in rows for n in row)))
    return pd.DataFrame(rows, columns=list(names))
