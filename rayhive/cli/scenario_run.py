"""``rayhive scenario run``: one scenario, the story of its faults, and their cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rayhive.cli.scenario import Config, Name, Peers
from rayhive.cli.study import Sets
from rayhive.cli.text import Address, complain
from rayhive.errors import RayhiveError

if TYPE_CHECKING:
    from rayhive.api import Run
    from rayhive.api.story import Story


def run(
    name: Name,
    seed: Annotated[int, typer.Option(help="Seed of the plan, the data and the parameters.")] = 0,
    peers: Peers = None,
    config: Config = None,
    set_: Sets = None,
    address: Address = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run folder; by default runs/NAME-TIME.", show_default=False),
    ] = None,
    twin: Annotated[
        bool,
        typer.Option(help="Run the same without faults first, to measure their cost."),
    ] = True,
) -> None:
    """Run one scenario and print its story: the faults, their proofs, recoveries and invariants.

    Example: `rayhive scenario run kill-one --seed 1`

    Exit code 1 if the replicate failed, a fault did not take effect, or an invariant is violated.
    """
    from rayhive import api
    from rayhive.sweep.signals import Interrupted

    try:
        found = api.run_scenario(
            name,
            seed=seed,
            peers=peers,
            config=config,
            set=set_ or (),
            address=address,
            out=out,
            twin=twin,
        )
    except Interrupted as stop:
        complain(f"{stop.reason}; finished replicates are kept in {stop.folder}")
        raise typer.Exit(stop.exit_code) from None
    stories = found.stories()
    for story in stories:
        print_story(story)
    _print_notice_grid(found)
    raise typer.Exit(1 if any(story.wrong for story in stories) else 0)


def print_story(story: Story) -> None:
    """Print the story of a replicate and draw its timeline."""
    print(f"\n{story}")
    try:
        print(f"picture: {story.write_picture()}")
    except RayhiveError as error:
        complain(str(error))


def _print_notice_grid(run: Run) -> None:
    """Print goodput against the length of the notice, if the run has several lengths."""
    from rayhive.report.notice_grid import SCENARIO, notice_grid, notice_html, notice_lines

    names = {str(row["scenario"]) for row in run.results.rows}
    if sum(SCENARIO.fullmatch(name) is not None for name in names) < 2:
        return
    try:
        points = notice_grid(run.folder)
        print()
        for line in notice_lines(points):
            print(line)
        picture = run.folder / "notice-grid.html"
        picture.write_text(notice_html(points), encoding="utf-8")
        print(f"picture: {picture}")
    except RayhiveError as error:
        complain(str(error))
