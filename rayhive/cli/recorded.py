"""``rayhive trace``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayhive.cli.options import RunFolder

if TYPE_CHECKING:
    from rayhive.metrics.clocks import Clocks


def trace(
    folder: RunFolder,
    trial: Annotated[
        int | None, typer.Argument(metavar="[TRIAL]", help="Its number; by default the only one.")
    ] = None,
    replicate: Annotated[int, typer.Option(help="Number of the replicate.")] = 0,
    scenario: Annotated[
        str | None,
        typer.Option(help="Its scenario; by default the only one of the trial with faults."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file; by default trace.json in its folder.")
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
        yield f"clocks of the nodes, less the supervisor's ({verb}):"
    for node, offset in clocks.offsets.items():
        peers = ", ".join(name for name, its in clocks.nodes.items() if its == node)
        yield (
            f"  {node[:8]}  {offset.seconds * 1e3:+.0f} ms, between {offset.low * 1e3:+.0f} and "
            f"{offset.high * 1e3:+.0f} ms  ({peers})"
        )
    if clocks.slack_s:
        yield f"  the order of events is contradictory by up to {clocks.slack_s * 1e3:.0f} ms"
