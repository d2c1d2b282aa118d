"""The page "Add a fault kind" of docs/faults.md, followed step by step."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayhive.faults.kind import FaultKind
from rayhive.registry import FAULTS
from tests.contract.fault_checks import (
    check_declaration,
    check_documentation,
    check_effect,
    check_parameters,
    check_proof,
)
from tests.unit.fault_fakes import shorten

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
TARGET = "rayhive.faults.kinds.terminate"


def blocks() -> list[str]:
    """Return the code of the steps: the file, the registration, the row."""
    section = PAGE.read_text(encoding="utf-8").split("## Add a fault kind")[1].split("\n## ")[0]
    found = re.findall(r"^    ```\w+\n(.*?)^    ```$", section, flags=re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FaultKind]]:
    """The kind, in a file of its own and registered."""
    code, registration, _ = blocks()
    assert f'FAULTS.register_lazy("terminate", "{TARGET}:Terminate")' in registration
    file = tmp_path / "terminate.py"
    file.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(TARGET, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, TARGET, module)
    spec.loader.exec_module(module)
    with FAULTS.replaced("terminate", module.Terminate):
        yield FAULTS.get("terminate")


def test_the_kind_of_the_page_keeps_the_contract(added: type[FaultKind]) -> None:
    check_declaration(added)
    check_parameters("terminate", added)
    check_documentation("terminate", added, blocks()[2].splitlines())
    assert added.removes_peers() and added.needs_for({"where": "other"}) == ("signals", "nodes")


def test_the_kind_of_the_page_takes_effect_and_heals(
    added: type[FaultKind], tmp_path: Path
) -> None:
    asyncio.run(check_effect("terminate", added, tmp_path))


def test_the_kind_of_the_page_proves_nothing_where_nothing_happened(
    added: type[FaultKind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    monkeypatch.setattr(sys.modules[TARGET], "SETTLE_S", 0.3)
    asyncio.run(check_proof("terminate", added, tmp_path))
