"""Write docs/catalogue.md from the scenario library: ``python scripts/scenarios_page.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rayhive import api
from rayhive.cli.plan_text import fault_plan_lines
from rayhive.faults.scenario import Scenario

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
    scenarios = [scenario for scenario, _ in api.list_scenarios()]
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
    for planned in api.plan_scenario(scenario.name)[0]:
        yield f"{planned.name}: {planned.about}"
        yield from (line.rstrip() for line in fault_plan_lines(planned.plan, planned.seconds))
    yield "```"


if __name__ == "__main__":
    main()
