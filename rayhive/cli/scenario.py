"""``rayhive scenario``."""

from __future__ import annotations

from typing import Annotated

import typer

from rayhive.cli.text import print_json, print_rows

app = typer.Typer(no_args_is_help=True, help="Fault scenarios: which there are, what they plan.")


@app.command("list")
def list_scenarios(
    format: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """List the scenarios that a study can name.

    Example: `rayhive scenario list`
    """
    import rayhive.faults  # noqa: F401  (fills the registry)
    from rayhive.registry import SCENARIOS

    rows = [{"scenario": name, "about": entry.about} for name, entry in SCENARIOS.items()]
    if format == "json":
        print_json(rows)
    else:
        print_rows(rows, {"scenario": "scenario", "about": "what happens"})


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="The scenario.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Seed of the plan.")] = 0,
    peers: Annotated[int, typer.Option(help="Peers of the swarm.", min=1)] = 2,
    format: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Show the concrete plan that a scenario makes of a seed.

    Example: `rayhive scenario show none --seed 1`
    """
    import rayhive.faults  # noqa: F401  (fills the registry)
    from rayhive.registry import SCENARIOS

    scenario = SCENARIOS.get(name, "NAME")
    plan = scenario().plan(seed, peers)
    if format == "json":
        print_json(plan)
        return
    print(f"{name}: {scenario.about}")
    for fault in plan:
        print("  " + ", ".join(f"{key} {value}" for key, value in fault.items()))
    if not plan:
        print("  no faults")
