"""The page "Add an invariant" of docs/extending.md, followed step by step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rayhive.invariants import INVARIANTS
from tests.contract.test_invariant_contract import CLEAN, PLANTED, check_planted, last, result_of

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
NAME = "groups_within_swarm"


def blocks() -> list[str]:
    """Return the code of the steps: the file, the registration, the planted violation."""
    section = PAGE.read_text(encoding="utf-8").split("## Add an invariant")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)


def test_the_invariant_of_the_page_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    code, registration, planted = blocks()
    assert f'"{NAME}", "rayhive.invariants.{NAME}:GroupsWithinSwarm"' in registration
    module: dict[str, Any] = {"__name__": f"rayhive.invariants.{NAME}"}
    exec(compile(code, NAME, "exec"), module)
    entries = eval(f"{{{planted}}}", {"last": last})
    with INVARIANTS.replaced(NAME, module["GroupsWithinSwarm"]):
        with pytest.raises(AssertionError, match="no violation is planted"):
            check_planted(NAME)
        monkeypatch.setitem(PLANTED, NAME, entries[NAME])
        check_planted(NAME)
        for make in CLEAN.values():
            assert result_of(make(), NAME).ok
