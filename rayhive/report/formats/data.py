"""CSV and JSON: every column, in full precision, under its name."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from rayhive.columns import Row
from rayhive.report.frames import configuration_types
from rayhive.report.results import Results


def csv_text(results: Results, rows: Sequence[Row], width: int, color: bool) -> str:
    """Return CSV with a header line; an empty field is an unknown value."""
    names = configuration_types()
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([row[name] for name in names] for row in rows)
    return out.getvalue()


def json_text(results: Results, rows: Sequence[Row], width: int, color: bool) -> str:
    """Return a list of objects; null is an unknown value."""
    names = configuration_types()
    objects = [{name: row[name] for name in names} for row in rows]
    return json.dumps(objects, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
