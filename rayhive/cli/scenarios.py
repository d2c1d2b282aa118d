"""``rayhive scenario list``, ``show`` and ``run``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayhive.cli.options import Address, ListFormat, Sets
from rayhive.cli.output import complain, print_json, print_rows
from rayhive.errors import ConfigError, RayhiveError

if TYPE_CHECKING:
    from rayhive.api import Run

app = typer.Typer(no_args_is_help=True, help="List, show and run fault scenarios.")

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A scenario of the library, or the path of a YAML file."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A study whose swarm, workload and budget replace the scenario's.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Seed of the study, of which replicate 0 is taken; by default the study's."),
]
Peers = Annotated[
    int | None,
    typer.Option(help="Peers that start together; by default the scenario's.", min=1),
]


@app.command("list")
def list_scenarios(format: ListFormat = "table") -> None:
    """List the scenarios of the library with their needs, peers and durations.

    Example: `rayhive scenario list`

    The column `here` says whether this machine can run a scenario.
    """
    from rayhive import api

    rows: list[dict[str, Any]] = [
        {
            "scenario": scenario.name,
            "about": scenario.about(),
            "needs": sorted({need for each in scenario.needs.values() for need in each}),
            "here": not unmet,
            "lacking": {str(problem.value): problem.allowed for problem in unmet},
            "peers": scenario.file.peers.default,
            "least_peers": scenario.file.peers.least,
            "seconds": scenario.seconds,
            "kinds": list(scenario.kinds),
            "args": scenario.args,
            "stands_for": list(scenario.members),
        }
        for scenario, unmet in api.list_scenarios()
    ]
    if format == "json":
        print_json(rows)
        return
    columns = {"scenario": "scenario", "about": "about", "needs": "needs", "here": "here"}
    print_rows(rows, {**columns, "peers": "peers>", "seconds": "seconds>"})
    lacking = {item for row in rows for item in row["lacking"].items()}
    for kind, reason in sorted(lacking):
        print(f"not here: {kind}: {reason}")


@app.command("show")
def show(
    name: Name,
    seed: Seed = None,
    peers: Peers = None,
    config: Config = None,
    set_: Sets = None,
    format: ListFormat = "table",
) -> None:
    """Show the fault plan of a scenario for a seed. Starts nothing.

    Example: `rayhive scenario show kill-one --seed 1`

    Parameters of a scenario are set with --set, as in `--set scenario_args.chaos.faults=5`.
    """
    from rayhive import api
    from rayhive.cli.plan_text import fault_plan_lines

    shown, unmet = api.plan_scenario(name, seed=seed, peers=peers, config=config, set=set_)
    for each in shown:
        for warning in each.warnings:
            complain(warning)
        if format == "table":
            print(f"{each.name}: {each.about}")
            print("\n".join(fault_plan_lines(each.plan, each.seconds)))
    if format == "json":
        plans = [each.plan for each in shown]
        found = [{"hash": plan.hash, "plan": plan.model_dump(mode="json")} for plan in plans]
        print_json(found if len(found) > 1 else found[0])
    if unmet:
        complain(f"this machine cannot run {name}:")
        raise ConfigError(unmet)


@app.command("run")
def run(
    name: Name,
    seed: Seed = None,
    peers: Peers = None,
    config: Config = None,
    set_: Sets = None,
    address: Address = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The run folder, or its URL; by default runs/NAME-TIME."),
    ] = None,
    twin: Annotated[
        bool, typer.Option(help="Run the same without faults first, to measure their cost.")
    ] = True,
) -> None:
    """Run one scenario and print its story: the faults, their proofs, recoveries and invariants.

    Example: `rayhive scenario run kill-one --seed 1`

    Exit code 1 if the replicate failed, a fault did not take effect, or an invariant is violated.
    """
    from rayhive import api

    found = api.run_scenario(
        name, seed=seed, peers=peers, config=config, set=set_, address=address, out=out, twin=twin
    )
    wrong = print_stories(found)
    try:
        _print_notice_grid(found)
    except RayhiveError as error:
        complain(str(error))
    raise typer.Exit(int(wrong))


def print_stories(run: Run, always: bool = False) -> bool:
    """Print the stories of a run and draw their timelines; return whether one went wrong."""
    stories = run.stories(always)
    for story in stories:
        print(f"\n{story}")
        try:
            print(f"picture: {story.write_picture()}")
        except RayhiveError as error:
            complain(str(error))
    return any(story.wrong for story in stories)


def _print_notice_grid(run: Run) -> None:
    """Print goodput against the length of the notice, if the run has several lengths."""
    from rayhive.report.notice_grid import notice_lines
    from rayhive.report.page.write import notice_html

    points = run.notice_grid()
    if points:
        print("\n".join(["", *notice_lines(points)]))
        picture = run.folder / "notice-grid.html"
        picture.write_text(notice_html(points), encoding="utf-8")
        print(f"picture: {picture}")
