"""Tables of the documentation list exactly the registered parts."""

from __future__ import annotations

import re

import pytest

from rayhive.cluster.node.tools import NODE_TOOLS
from rayhive.invariants import INVARIANTS
from rayhive.registry import BASELINES, CODECS, NOTICE_SOURCES
from rayhive.spec.axes import REGISTERED
from rayhive.workloads import WORKLOADS
from tests.fixtures.pages import DOCS, table


def listed(page: str, heading: str) -> list[str]:
    """Return the names in the first column of the first table below a heading."""
    return [name for row in table(page, heading)[2:] for name in re.findall(r"`([^`]+)`", row[0])]


@pytest.mark.parametrize(
    ("page", "heading", "registered"),
    [
        ("compression.md", "Codecs", CODECS.names()),
        ("workloads.md", "Workloads", WORKLOADS.names()),
        ("baselines.md", "The baselines", BASELINES.names()),
        ("sweep.md", "Search space", REGISTERED.names()),
        ("faults.md", "Node tools", NODE_TOOLS.names()),
        ("faults-metrics.md", "Invariants", INVARIANTS.names()),
        ("cluster.md", "Preemption notices", NOTICE_SOURCES.names()),
    ],
    ids=[
        "codecs",
        "workloads",
        "baselines",
        "axes",
        "node tools",
        "invariants",
        "notices",
    ],
)
def test_a_table_has_a_row_for_every_registered_part(
    page: str, heading: str, registered: list[str]
) -> None:
    rows = listed(page, heading)
    missing, unknown = sorted(set(registered) - {*rows}), sorted({*rows} - set(registered))
    assert not missing, f"docs/{page}, {heading!r} needs a row for {', '.join(missing)}"
    assert not unknown, f"docs/{page}, {heading!r} lists unknown names: {', '.join(unknown)}"
    assert len(rows) == len(set(rows)), f"docs/{page}, {heading!r} lists a name twice"


def test_the_parts_of_an_averager_are_modules() -> None:
    folder = DOCS.parent / "rayhive" / "averaging"
    rows = table("rounds.md", "Parts of an averager")[2:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    assert named <= {path.stem for path in folder.glob("*.py")}
