"""``rayhive report``."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from rayhive.cli.options import RunFolder, local_path
from rayhive.cli.output import complain


def report(
    folder: RunFolder,
    out: Annotated[
        Path | None,
        typer.Option(help="The file; by default report.html in the run folder.", parser=local_path),
    ] = None,
    watch: Annotated[
        bool, typer.Option(help="Write it again whenever a running sweep changes the folder.")
    ] = False,
    every: Annotated[
        float, typer.Option(help="Seconds between two looks at the folder, with --watch.", min=0.2)
    ] = 5.0,
) -> None:
    """Write the results of a run as one HTML file that opens offline.

    Examples: `rayhive report runs/quickstart`, `rayhive report runs/quickstart --watch`

    The page has a recommendation, the table, the Pareto front, loss curves, the time of a round,
    the faults, the importance of the axes, a map of the winners and the provenance. With --watch
    the page loads itself again; Ctrl-C ends the watch, as the end of the sweep does.
    """
    from rayhive import api

    if not watch:
        print(api.write_report(folder, out))
        return
    with closing(api.watch_report(folder, out, every_s=every, wait=_rest)) as written:
        try:
            for number, path in enumerate(written):
                if not number:
                    print(path, flush=True)
        except KeyboardInterrupt:
            complain("watch ended; the report does not change any more")


def _rest(seconds: float) -> None:
    """Sleep, and go on at the lowest priority: the sweep that is watched measures times."""
    os.nice(19)
    time.sleep(seconds)
