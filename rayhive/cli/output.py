"""Output that several commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rayhive.errors import without_secrets

#: Width of a table that goes to a file or a pipe [characters].
PIPE_WIDTH = 160


def complain(text: str) -> None:
    """Print a message on the standard error output, with passwords masked."""
    print(f"rayhive: {without_secrets(text)}", file=sys.stderr, flush=True)


def print_json(value: object) -> None:
    """Print a value as JSON on the standard output."""
    print(json.dumps(value, indent=1, default=str))


def print_rows(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print rows as a table on the standard output.

    Args:
        rows: The rows.
        columns: Key -> header; a header that ends in ``>`` is right-aligned.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for header in columns.values():
        side: Literal["left", "right"] = "right" if header.endswith(">") else "left"
        table.add_column(header.rstrip(">"), justify=side, overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cell(row.get(key))) for key in columns))
    chosen = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if chosen else PIPE_WIDTH).print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
