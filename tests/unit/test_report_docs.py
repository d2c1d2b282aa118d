"""docs/results.md and rayhive/columns.py say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayhive.columns import BY_NAME, COLUMNS, REPLICATE_COLUMNS, Column
from rayhive.metrics.aggregate import EXTRA_COLUMNS
from rayhive.report.formats import FORMATS

TEXT = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("` "): [cell.strip() for cell in cells]
    for cells in (
        line.strip("|").split("|") for line in TEXT.splitlines() if line.startswith("| `")
    )
    if re.fullmatch(r" `[a-z0-9_]+` ", cells[0])
}
BETTER = {"minimize": "lower", "maximize": "higher", None: ""}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_a_column_is_documented_as_it_is(column: Column) -> None:
    _, unit, better, definition = ROWS[column.name]
    assert unit == column.unit
    assert better == BETTER[column.better]
    assert definition.startswith(f"{column.about}.")


def test_every_column_is_there_in_its_order_and_none_besides() -> None:
    names = list(ROWS)
    assert names == [*BY_NAME, *EXTRA_COLUMNS, *REPLICATE_COLUMNS]


def test_every_format_is_there() -> None:
    assert all(f"--format {name}" in TEXT for name in FORMATS)
