"""docs/extending.md, followed step by step: each part that it adds keeps its contract.

Models and tables derive from axes and columns when rayhive is imported.
``tests/unit/test_extending_copy.py`` therefore adds those of the page to a copy of rayhive.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from rayhive.api.scenarios import scenario_config
from rayhive.cluster.node.tools import NODE_TOOLS, OfferedTool
from rayhive.faults import node_tools
from rayhive.faults.kind import FaultKind
from rayhive.faults.library import plan_of
from rayhive.registry import CODECS, FAULTS, INVARIANTS, WORKLOADS
from rayhive.workloads.loading import load_workload
from tests.contract import (
    test_codec_contract,
    test_invariant_contract,
    test_node_tool_contract,
    test_workload_contract,
)
from tests.contract.fault_checks import (
    check_declaration,
    check_documentation,
    check_effect,
    check_parameters,
    check_proof,
)
from tests.fixtures.pages import steps, table
from tests.unit.fault_fakes import shorten

TERMINATE = "rayhive.faults.kinds.terminate"


def module_of(file: str, code: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a new module of rayhive, as if it had been written to its file."""
    name = file.removesuffix(".py").replace("/", ".")
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(code, file, "exec"), vars(module))
    return module


def registered(heading: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """Return the name and the class of a section's new file and of its registration."""
    code = steps(heading)
    file, registry = list(code)[:2]
    module = module_of(file, code[file], monkeypatch)
    found = re.search(r'register_lazy\(\s*"(\w+)", "([\w.]+):(\w+)"\s*\)', code[registry])
    if found is None:  # the file's name is its registration
        name = Path(file).stem
        return name, getattr(module, name.title().replace("_", ""))
    name, path, attribute = found.groups()
    assert module.__name__ == path
    return name, getattr(module, attribute)


def checks(contract: ModuleType, argument: str) -> list[Callable[..., None]]:
    """Return the tests of a contract with no other argument than the tested part."""
    found = [
        check
        for name, check in vars(contract).items()
        if name.startswith("test_") and [*inspect.signature(check).parameters] == [argument]
    ]
    assert len(found) > 3
    return found


@pytest.mark.parametrize(
    ("heading", "page", "of"),
    [
        ("Add a codec", "compression.md", "Codecs"),
        ("Add a workload", "workloads.md", "Workloads"),
        ("Add an axis", "sweep.md", "Search space"),
        ("Add an axis", "results.md", "configuration"),
        ("Add a column", "results.md", "communication"),
        ("Add a fault kind", "faults.md", "Kinds on processes"),
        ("Add an invariant", "faults-metrics.md", "Invariants"),
        ("Add a node tool", "faults.md", "Node tools"),
    ],
)
def test_a_row_of_the_page_fits_its_table(heading: str, page: str, of: str) -> None:
    for row in steps(heading)[f"docs/{page}"].splitlines():
        assert row.count("|") - 1 == len(table(page, of)[0])


def test_the_codec_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    name, codec = registered("Add a codec", monkeypatch)
    with CODECS.replaced(name, codec):
        for check in checks(test_codec_contract, "name"):
            check(name=name)
    # n bytes and a codebook of 1032 bytes are less than 4n bytes from 345 elements on
    assert [codec().part_bytes(n, n) for n in (344, 345)] == [1376, 1377]


def test_the_workload_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    name, workload = registered("Add a workload", monkeypatch)
    with WORKLOADS.replaced(name, workload):
        made = load_workload(name)
        for check in checks(test_workload_contract, "workload"):
            check(made)


@pytest.fixture
def terminate(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FaultKind]]:
    """The fault kind of the page, registered."""
    name, kind = registered("Add a fault kind", monkeypatch)
    with FAULTS.replaced(name, kind):
        yield FAULTS.get("terminate")


def test_the_fault_kind_is_complete(terminate: type[FaultKind]) -> None:
    check_declaration(terminate)
    check_parameters("terminate", terminate)
    rows = steps("Add a fault kind")["docs/faults.md"].splitlines()
    check_documentation("terminate", terminate, rows)
    assert terminate.removes_peers()
    assert terminate.needs_for({"where": "other"}) == ("signals", "nodes")


def test_the_fault_kind_takes_effect_and_heals(terminate: type[FaultKind], tmp_path: Path) -> None:
    asyncio.run(check_effect("terminate", terminate, tmp_path))


def test_the_fault_kind_proves_nothing_where_nothing_happened(
    terminate: type[FaultKind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch)
    monkeypatch.setattr(sys.modules[TERMINATE], "SETTLE_S", 0.3)
    asyncio.run(check_proof("terminate", terminate, tmp_path))


def test_the_scenario_has_a_plan(tmp_path: Path) -> None:
    ((name, text),) = (item for item in steps("Add a scenario").items() if "yaml" in item[0])
    file = tmp_path / f"example-{Path(name).name}"  # the library may have the scenario
    file.write_text(text, encoding="utf-8")
    study = scenario_config(str(file))
    peers = study.swarm.peers
    plan = plan_of(file, seed=1, peers=peers, swarm=study.swarm, budget=study.budget)
    assert (plan.scenario, [fault.kind for fault in plan.faults]) == (file.stem, ["kill"] * 2)


def test_the_invariant_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    name, invariant = registered("Add an invariant", monkeypatch)
    planted = steps("Add an invariant")["tests/contract/test_invariant_contract.py"]
    entries = eval(f"{{{planted}}}", vars(test_invariant_contract))
    monkeypatch.delitem(test_invariant_contract.PLANTED, name, raising=False)
    with INVARIANTS.replaced(name, invariant):
        with pytest.raises(AssertionError, match="no violation is planted"):
            test_invariant_contract.check_planted(name)
        monkeypatch.setitem(test_invariant_contract.PLANTED, name, entries[name])
        test_invariant_contract.check_planted(name)
        for clean in test_invariant_contract.CLEAN:
            test_invariant_contract.test_a_clean_log_passes(clean, name)


def test_the_node_tool_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, code = "file_limit", steps("Add a node tool")
    declared = dict(vars(node_tools))
    exec(compile(code["rayhive/faults/node_tools.py"], "node_tools.py", "exec"), declared)
    for attribute in declared.keys() - vars(node_tools).keys():
        monkeypatch.setattr(node_tools, attribute, declared[attribute], raising=False)
    file = "rayhive/cluster/node/tools/file_limit.py"
    implementation = module_of(file, code[file], monkeypatch).FileLimitTool
    offered: list[OfferedTool] = []
    exec(
        code["rayhive/cluster/node/tools/__init__.py"],
        {
            **declared,
            "FileLimitTool": implementation,
            "offer": lambda *both: offered.append(OfferedTool(*both)),
        },
    )
    contract = dict(vars(test_node_tool_contract), psutil=psutil)
    exec(code["python"], contract)
    case = eval(f"{{{code['tests/contract/test_node_tool_contract.py']}}}", contract)[name]
    monkeypatch.setitem(test_node_tool_contract.CASES, name, case)
    monkeypatch.setitem(test_node_tool_contract.INTERFACES, name, declared["FILE_LIMIT"])
    with NODE_TOOLS.replaced(name, offered[0]):
        test_node_tool_contract.check_offer(name, NODE_TOOLS.get(name))
        asyncio.run(test_node_tool_contract.check_use(name, tmp_path))
