"""Write docs/catalogue.md from the scenario library: ``python scripts/scenarios_page.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rayhive.api.scenarios import scenario_config
from rayhive.cli.plan_text import fault_plan_lines
from rayhive.faults.library import load_scenario
from rayhive.faults.scenario import Scenario
from rayhive.registry import SCENARIOS
from rayhive.sweep.resolve import plan_replicate

PAGE = Path(__file__).parents[1] / "docs" / "catalogue.md"

HEAD = """# Scenario catalogue

Every scenario of the library, with its parameters, its needs, and its plan for one seed.
[Scenarios](scenarios.md) explains how to run one, and how to write one of your own;
[Faults](faults.md) describes each kind.

`rayhive scenario list` prints the same list with the column `here`: whether this machine can inject
the faults. Another seed, another number of peers or another parameter gives another plan;
`rayhive scenario show NAME` prints it.

"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page."""
    scenarios = [each for each in map(load_scenario, SCENARIOS.names()) if not each.given]
    overview = ["| scenario | what happens | kinds |", "|---|---|---|"]
    for each in scenarios:
        kinds = ", ".join(f"`{kind}`" for kind in each.kinds) or "–"
        overview.append(f"| [`{each.name}`](#{each.name}) | {each.about()} | {kinds} |")
    parts = ["\n".join(section(each)) for each in scenarios]
    return HEAD + "\n".join(overview) + "\n\n" + "\n\n".join(parts) + "\n"


def section(scenario: Scenario) -> Iterator[str]:
    """Yield the lines about one scenario."""
    peers = scenario.file.peers
    yield f"## {scenario.name}\n"
    yield f"{scenario.about()}\n"
    yield f"* Peers: at least {peers.least}, {peers.default} by default."
    yield f"* Training: {scenario.seconds:g} s at most."
    if args := [f"`{name}: {value}`" for name, value in scenario.args.items()]:
        yield f"* Parameters: {', '.join(args)}."
    if needs := sorted({need for each in scenario.needs.values() for need in each}):
        yield f"* Needs: {', '.join(needs)}."
    if scenario.members:
        yield f"* Stands for: {', '.join(f'`{name}`' for name in scenario.members)}."
    yield from ("\n```", f"$ rayhive scenario show {scenario.name}")
    for name in scenario.members or (scenario.name,):
        study = scenario_config(name, None, (), None, 0)
        plan = plan_replicate(study, name, 0, [], set())
        yield f"{name}: {load_scenario(name).about()}"
        lines = fault_plan_lines(plan, study.budget.seconds_per_replicate)
        yield from (line.rstrip() for line in lines)
    yield "```"


if __name__ == "__main__":
    main()
