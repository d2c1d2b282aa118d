"""``rayhive scenario list`` and ``show``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayhive.cli.study import Sets
from rayhive.cli.text import complain, print_json, print_rows
from rayhive.errors import ConfigError, unknown

if TYPE_CHECKING:
    from rayhive.faults.scenario import Scenario

app = typer.Typer(no_args_is_help=True, help="List, show and run fault scenarios.")

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A scenario of the library, or a file.", show_default=False
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="A study whose swarm, workload and budget replace the scenario's.",
        show_default=False,
    ),
]
Peers = Annotated[
    int | None,
    typer.Option(help="Peers that start together; by default the scenario's.", min=1),
]


@app.command("list")
def list_scenarios(
    format: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """List the scenarios of the library with their needs, peers and durations.

    Example: `rayhive scenario list`
    """
    from rayhive.faults.library import load_scenario
    from rayhive.registry import SCENARIOS

    _check_format(format)
    scenarios = [load_scenario(name) for name in SCENARIOS.names()]
    rows = [_row(scenario) for scenario in scenarios if not scenario.given]
    if format == "json":
        print_json(rows)
        return
    shown = [{**row, "needs": ", ".join(row["needs"])} for row in rows]
    columns = {"scenario": "scenario", "about": "about", "needs": "needs", "here": "here"}
    print_rows(shown, {**columns, "peers": "peers>", "seconds": "seconds>"})
    for kind, reason in sorted({item for row in rows for item in row["lacking"].items()}):
        print(f"not here: {kind}: {reason}")


@app.command("show")
def show(
    name: Name,
    seed: Annotated[int, typer.Option(help="Seed of the study; replicate 0 is shown.")] = 0,
    peers: Peers = None,
    config: Config = None,
    set_: Sets = None,
    format: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Show the fault plan of a scenario for a seed. Starts nothing.

    Example: `rayhive scenario show kill-one --seed 1`

    Parameters of a scenario are set with --set, as in `--set scenario_args.chaos.faults=20`.
    """
    from rayhive.cli.scenario_text import plan_lines
    from rayhive.cluster.node.capabilities import here, missing
    from rayhive.faults.library import load_scenario, with_members
    from rayhive.sweep.resolve import plan_replicate
    from rayhive.sweep.scenario_study import scenario_config

    _check_format(format)
    asked = load_scenario(name)
    members = with_members([name])
    shown = []
    for each in members:
        scenario = load_scenario(each)
        study = scenario_config(each, config, set_ or (), peers, seed)
        warnings: list[str] = []
        plan = plan_replicate(study, each, 0, warnings)
        for warning in warnings:
            complain(warning)
        if format == "table":
            print(f"{scenario.name}: {scenario.about}")
            for line in plan_lines(plan, study.budget.seconds_per_replicate):
                print(line)
        shown.append({"hash": plan.hash, "plan": plan.model_dump(mode="json")})
    if format == "json":
        print_json(shown if asked.members else shown[0])
    refused = missing(asked.needs, here())
    if refused:
        complain(f"this machine cannot run {asked.name}:")
        raise ConfigError(refused)


def _row(scenario: Scenario) -> dict[str, Any]:
    from rayhive.cluster.node.capabilities import here, missing

    lacking = {str(problem.value): problem.allowed for problem in missing(scenario.needs, here())}
    return {
        "scenario": scenario.name,
        "about": scenario.about,
        "needs": sorted({need for each in scenario.needs.values() for need in each}),
        "here": not lacking,
        "lacking": lacking,
        "peers": scenario.file.peers.default,
        "least_peers": scenario.file.peers.least,
        "seconds": scenario.seconds,
        "kinds": list(scenario.kinds),
        "args": scenario.args,
        "stands_for": list(scenario.members),
    }


def _check_format(format: str) -> None:
    if format not in ("table", "json"):
        raise ConfigError(unknown("--format", format, ("table", "json")))
