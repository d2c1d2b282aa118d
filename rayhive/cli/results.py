"""``rayhive results``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from rayhive.cli.text import complain


def results(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The run folder.", show_default=False)
    ],
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="Make one row of all replicates that agree in this column: codec, "
            "powersgd_rank, delay, …; may be repeated.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="table, md, csv, json or latex.")] = "table",
    sort: Annotated[
        str | None,
        typer.Option(
            help="Column to sort by; with - in front, descending (--sort=-samples_per_s).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the results table of a run: one row per configuration, computed from its events.

    Examples: `rayhive results runs/quickstart`, `rayhive results runs/quickstart --by codec
    --format md`
    """
    from rayhive.report.render import results_text

    print(
        results_text(
            folder,
            format,
            by or (),
            sort,
            console_width=shutil.get_terminal_size((120, 24)).columns,
            color=sys.stdout.isatty(),
            complain=complain,
        )
    )
