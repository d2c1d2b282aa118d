"""Section "table": the results table with values to sort and filter by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayhive.columns import Column, Row
from rayhive.metrics.folds import Total
from rayhive.metrics.rows import NO_FAULTS
from rayhive.report.brief import COUNTS
from rayhive.report.page.run_data import RunData
from rayhive.report.table import EMPTY, build_table

#: Columns that are shown at first, besides the keys and the objectives.
FIRST = (
    "n",
    "n_failed",
    "pareto_probability",
    "not_separable",
    "final_loss",
    "samples_per_s",
    "payload_bytes_per_round",
)
#: Further such columns of a run with faults.
FIRST_OF_FAULTS = ("recover_p95_s", "retention", "regret")
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class PageCell:
    """Cell of the table.

    Attributes:
        text: Text of the cell.
        value: Value to sort by; empty if it is not known.
        best: Whether its interval is on the better side of every other row's.
    """

    text: str
    value: str
    best: bool


@dataclass(frozen=True)
class PageColumn:
    """Column of the table.

    Attributes:
        column: Its declaration.
        first: Whether it is shown at first.
        numeric: Whether it is sorted by number.
        total: Whether its values are sums over replicates.
    """

    column: Column
    first: bool
    numeric: bool
    total: bool


@dataclass(frozen=True)
class PageRow:
    """Row of the table.

    Attributes:
        cells: Cells in the order of the columns.
        front: Whether the row is on the Pareto front.
        mark: ``recommended`` or ``ahead`` under its conditions; empty for other rows.
    """

    cells: tuple[PageCell, ...]
    front: bool
    mark: str


@dataclass(frozen=True)
class PageTable:
    """Table with all columns.

    Attributes:
        title: Text above the table.
        columns: Columns.
        keys: Number of leading columns that identify a row.
        rows: Rows.
        notes: Lines below the table.
    """

    title: str
    columns: tuple[PageColumn, ...]
    keys: int
    rows: tuple[PageRow, ...]
    notes: tuple[str, ...]


def page_table(run: RunData) -> PageTable:
    """Return the table of a run."""
    rows = list(run.results.folded)
    model = build_table(run.results, rows, wide=True)
    wanted = {*FIRST, *run.results.objectives}
    wanted |= {name for name in COUNTS if any(row.get(name) for row in rows)}
    if any(row["scenario"] != NO_FAULTS for row in rows):
        wanted |= {*FIRST_OF_FAULTS}
    order = _objectives_first([column.name for column in model.columns], model.keys, run)
    columns = tuple(
        PageColumn(
            column=column,
            first=n < model.keys or column.name in wanted,
            numeric=column.folded_type != "text",
            total=isinstance(column.fold, Total) and not column.fold.share,
        )
        for n, column in ((at, model.columns[at]) for at in order)
    )
    marks = {id(each.row): each.mark for each in run.recommendations if len(each.candidates) > 1}
    lines = []
    for row, cells in zip(rows, model.rows, strict=True):
        found = []
        for each, cell in zip(columns, (cells[at] for at in order), strict=True):
            value = row.get(each.column.name)
            text = empty_text(row, each.column) if cell.text == EMPTY else cell.text
            found.append(PageCell(text, "" if value is None else _sorted_by(value), cell.best))
        lines.append(PageRow(tuple(found), bool(row["pareto"]), marks.get(id(row), "")))
    return PageTable(model.title, columns, model.keys, tuple(lines), model.notes)


def _objectives_first(names: Sequence[str], keys: int, run: RunData) -> list[int]:
    """Return the order of the columns: those that identify a row, the objectives, the others."""
    ranks = {name: rank for rank, name in enumerate(run.results.objectives)}
    rest = sorted(range(keys, len(names)), key=lambda at: ranks.get(names[at], len(ranks)))
    return [*range(keys), *rest]


def empty_text(row: Row, column: Column) -> str:
    """Return the reason for which a row has no value in a column."""
    of_faults = column.stage == "twin" or column.group == "faults" or column.name == "retention"
    if column.group == "configuration" or (of_faults and row["scenario"] == NO_FAULTS):
        return EMPTY
    return NOT_RECORDED


def _sorted_by(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)
