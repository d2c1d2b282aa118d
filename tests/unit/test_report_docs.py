"""docs/results.md agrees with the declarations of the columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayhive.columns import Column, all_columns, configuration_columns, group_columns
from rayhive.report.render import FORMATS

TEXT = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("` "): [cell.strip() for cell in cells]
    for cells in (
        line.strip("|").split("|") for line in TEXT.splitlines() if line.startswith("| `")
    )
    if re.fullmatch(r" `[a-z0-9_]+` ", cells[0])
}
BETTER = {"minimize": "lower", "maximize": "higher", None: ""}


TABLE = [each for each in all_columns() if each.group not in ("replicate", "export")]
EXPORTED = [each for each in configuration_columns() if each.group == "export"]
IDENTITY = group_columns("replicate")


@pytest.mark.parametrize("column", TABLE, ids=lambda column: column.name)
def test_a_column_is_documented_as_declared(column: Column) -> None:
    assert column.name in ROWS, f"docs/results.md needs a row for {column.name}"
    _, unit, better, definition = ROWS[column.name]
    assert unit == column.unit
    assert better == BETTER[column.better]
    assert definition.startswith(column.about)


@pytest.mark.parametrize("column", [*EXPORTED, *IDENTITY], ids=lambda column: column.name)
def test_a_column_outside_of_tables_is_documented_as_declared(column: Column) -> None:
    assert column.name in ROWS, f"docs/results.md needs a row for {column.name}"
    _, where, definition = ROWS[column.name]
    places = {(True, True): "both", (True, False): "trials", (False, True): "configurations"}
    assert where == places[column.of_replicates, column.of_configurations]
    assert definition.startswith(column.about)


def test_the_documented_columns_are_the_declared_ones_in_order() -> None:
    assert list(ROWS) == [column.name for column in (*TABLE, *EXPORTED, *IDENTITY)]


def test_every_format_is_documented() -> None:
    assert all(f"--format {name}" in TEXT for name in FORMATS)
