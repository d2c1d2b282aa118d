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
            help="Its scenario; by default the one of the trial that has faults.",
            show_default=False,
        ),
    ] = None,
    address: Address = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where to; by default runs/replay-TIME.", show_default=False),
    ] = None,
) -> None:
    """Run a recorded replicate again: the same spec and the same fault plan, as they were written.

    Example: `rayhive replay runs/kill-one 0`

    Exit code 1 if the replicate failed, a fault did not take effect, or an invariant is violated.
    """
    from rayhive.cli.scenario_run import StoryProgress, new_folder, tell
    from rayhive.sweep.replay import recorded_spec, run_again
    from rayhive.sweep.signals import Interrupted, Interruption

    target = out if out is not None else new_folder("replay")
    spec = recorded_spec(folder, trial, replicate, scenario, out=target)
    try:
        with Interruption() as interruption:
            run_again(spec, StoryProgress(), interruption, address)
    except Interrupted as stop:
        complain(f"{stop.reason}; what was written is in {target}")
        raise typer.Exit(stop.exit_code) from None
    wrong = tell(target, always=True)
    print(f"all columns: {shlex.join(['rayhive', 'results', str(target)])}")
    raise typer.Exit(1 if wrong else 0)
