"""``rayhive replay``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rayhive.cli.text import Address, complain


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The run folder.", show_default=False)
    ],
    trial: Annotated[
        int, typer.Argument(metavar="TRIAL", help="Number of the trial.", show_default=False)
    ],
    replicate: Annotated[int, typer.Option(help="Number of the replicate.", min=0)] = 0,
    scenario: Annotated[
        str | None,
        typer.Option(
            help="Its scenario; by default the only one of the trial that has faults.",
            show_default=False,
        ),
    ] = None,
    address: Address = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the new replicate; by default runs/replay-TIME.", show_default=False
        ),
    ] = None,
) -> None:
    """Run a recorded replicate again, with the recorded spec and fault plan.

    Example: `rayhive replay runs/kill-one 0`

    Exit code 1 if the replicate failed, a fault did not take effect, or an invariant is violated.
    """
    from rayhive import api
    from rayhive.cli.scenario_run import print_story
    from rayhive.sweep.signals import Interrupted

    try:
        found = api.replay(
            folder, trial, replicate=replicate, scenario=scenario, address=address, out=out
        )
    except Interrupted as stop:
        complain(f"{stop.reason}; the unfinished replicate is in {stop.folder}")
        raise typer.Exit(stop.exit_code) from None
    stories = found.stories(always=True)
    for story in stories:
        print_story(story)
    print(f"all columns: {shlex.join(['rayhive', 'results', str(found.folder)])}")
    raise typer.Exit(1 if any(story.wrong for story in stories) else 0)
