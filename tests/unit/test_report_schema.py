"""The Parquet files keep the columns, their order and their types of version 0.1."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from rayhive.report.results import load_results
from tests.fixtures.faulted import kill_and_restart
from tests.fixtures.logs import Log, write_run

#: File -> [column, Arrow type] in order, as written by version 0.1.
SCHEMAS = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "parquet_schemas.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", SCHEMAS)
def test_columns_of_version_0_1_keep_their_order_and_types(name: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Log(), kill_and_restart(trial=1)])  # type: ignore[list-item]
    load_results(run).write_parquet(run)
    schema = pyarrow.parquet.read_schema(run / name)
    found = [[name, str(kind)] for name, kind in zip(schema.names, schema.types, strict=True)]
    known = {column for column, _ in SCHEMAS[name]}
    assert [pair for pair in found if pair[0] in known] == SCHEMAS[name]
