"""``rayhive compare``, ``trace`` and ``export``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayhive.cli.options import ListFormat, RunFolder, local_path, run_folder
from rayhive.cli.output import print_json, print_rows
from rayhive.errors import ConfigError

if TYPE_CHECKING:
    from rayhive.metrics.clocks import Clocks


def compare(
    a: Annotated[
        Path,
        typer.Argument(metavar="A", help="The first run folder, or its URL.", parser=run_folder),
    ],
    b: Annotated[
        Path, typer.Argument(metavar="B", help="The second run folder.", parser=run_folder)
    ],
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Column to compare; may be repeated. By default the objectives and key figures."
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting that may differ, as swarm.peers, or plan (of faults); may be repeated."
        ),
    ] = None,
    format: ListFormat = "table",
) -> None:
    """Compare two runs: changes with 95 % intervals, paired where seeds are common.

    Example: `rayhive compare runs/before runs/after`

    Refuses runs that differ in more than code, versions or hardware, and names every difference.
    A or B may also be the folder of one replicate, such as a replay's.
    """
    from rayhive import api
    from rayhive.report.comparison_text import comparison_rows, comparison_texts

    found = api.compare(a, b, columns=column or (), allow=allow or ())
    if format == "json":
        print_json(comparison_rows(found))
        return
    headers = {"configuration": "configuration", "scenario": "scenario", "column": "column"}
    headers |= {"a": "A>", "b": "B>", "change": "B - A, or B × A>", "n": "n>"}
    print_rows(comparison_texts(found), {**headers, "p": "p>", "verdict": "B is"})
    print()
    print("A:", found.names[0])
    print("B:", found.names[1])
    print(
        "(low to high): 95 % interval of the change. p: t-test, Holm's correction over the table."
    )
    for note in found.notes:
        print(note)


def trace(
    folder: RunFolder,
    trial: Annotated[
        str | None,
        typer.Argument(
            metavar="[TRIAL]", help="Its number, or name of a baseline; by default the only one."
        ),
    ] = None,
    replicate: Annotated[int, typer.Option(help="Number of the replicate.")] = 0,
    scenario: Annotated[
        str | None,
        typer.Option(help="Its scenario; by default the only one of the trial with faults."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file; by default trace.json in its folder.", parser=local_path),
    ] = None,
) -> None:
    """Write a trace of a replicate: peers, rounds, phases, state transfers and faults on one clock.

    Example: `rayhive trace runs/kill-one`, then open the file in https://ui.perfetto.dev

    DIR may also be the folder of one replicate, such as a replay's.
    """
    from rayhive import api

    path, clocks = api.trace(folder, trial, replicate=replicate, scenario=scenario, out=out)
    print(f"{path} (open it in https://ui.perfetto.dev)")
    for text in clock_lines(clocks):
        print(text)


def clock_lines(clocks: Clocks) -> Iterator[str]:
    """Yield the offset of each node's clock with its bounds."""
    if clocks.offsets:
        verb = "corrected" if clocks.corrected else "not corrected: they may all be equal"
        if all(offset.error_s == 0 for offset in clocks.offsets.values()):
            verb = "one clock: that of a common kernel"
        yield f"clocks of the nodes, less the supervisor's ({verb}):"
    for node, offset in clocks.offsets.items():
        peers = ", ".join(name for name, its in clocks.nodes.items() if its == node)
        yield (
            f"  {node[:8]}  {offset.seconds * 1e3:+.0f} ms, between {offset.low * 1e3:+.0f} and "
            f"{offset.high * 1e3:+.0f} ms  ({peers})"
        )
    if clocks.slack_s:
        yield f"  the order of events is contradictory by up to {clocks.slack_s * 1e3:.0f} ms"


def print_beside(recorded: Path, again: Path) -> None:
    """Print the key figures of a recorded replicate and of its replay, where both have some."""
    from rayhive import api
    from rayhive.report.comparison_text import comparison_texts

    try:
        found = api.compare(recorded, again)
    except ConfigError:  # one of the two was stopped, and has no figures
        return
    for row in comparison_texts(found):
        print(f"{row['column']}: recorded {row['a']}, again {row['b']}")


def export(
    folder: RunFolder,
    to: Annotated[str, typer.Option(help="tensorboard, wandb (offline) or mlflow.")],
    out: Annotated[
        Path | None,
        typer.Option(help="A new folder; by default one in the run folder.", parser=local_path),
    ] = None,
) -> None:
    """Write each replicate of a run for TensorBoard, Weights & Biases or MLflow.

    Example: `rayhive export runs/quickstart --to tensorboard`

    A replicate is one run of the tool: its configuration, its evaluations by committed samples, and
    the columns of its row.
    """
    from rayhive import api

    path, count = api.export(folder, to, out)
    print(f"{count} replicates in {path}")
