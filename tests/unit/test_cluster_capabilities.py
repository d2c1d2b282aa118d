"""Capabilities are tried on the machine; a missing one is reported with its reason."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rayhive.cluster.doctor import doctor
from rayhive.cluster.node import capabilities, process_group
from rayhive.cluster.testbed import privilege
from rayhive.errors import ClusterError
from rayhive.faults.kind import needs_of
from rayhive.faults.target import CAPABILITIES
from tests.unit.fault_fakes import my_groups

ALL: dict[str, str | None] = dict.fromkeys(CAPABILITIES)
#: Capabilities of a testbed.
PLACES = ("link", "node", "nodes", "drain")


@pytest.fixture(autouse=True)
def no_testbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(capabilities.TESTBED_VARIABLE, raising=False)
    capabilities.here.cache_clear()
    yield
    capabilities.here.cache_clear()


def test_every_capability_has_an_answer_and_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = capabilities.here()
    assert first.keys() == CAPABILITIES.keys()
    assert first["signals"] is None
    monkeypatch.setattr(subprocess, "Popen", None)
    assert capabilities.here() is first
    with pytest.raises(TypeError):
        first["signals"] = "no"  # type: ignore[index]


def test_trying_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities.machine, "short_temporary_directory", lambda: str(tmp_path))
    capabilities.here()
    assert list(tmp_path.iterdir()) == []
    assert process_group.mounts_below(tmp_path) == []
    assert my_groups() == []


def test_links_and_nodes_need_a_testbed(monkeypatch: pytest.MonkeyPatch) -> None:
    # where no cluster is named one is made, if that is possible
    monkeypatch.setattr(privilege, "lacking", lambda: "run it as root")
    told = capabilities.here()
    assert [told[name] for name in PLACES] == ["run it as root"] * 4
    capabilities.here.cache_clear()
    monkeypatch.setattr(privilege, "lacking", lambda: None)
    told = capabilities.here()
    assert [told[name] for name in PLACES] == [None] * 4


def test_on_a_cluster_links_and_nodes_need_a_testbed_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OneNode:
        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def nodes() -> list[dict[str, bool]]:
            return [{"Alive": True}]

    monkeypatch.setitem(sys.modules, "ray", OneNode)
    told = capabilities.here()
    for name in ("link", "node"):
        assert told[name] == "needs a testbed: rayhive testbed up FILE"
    assert "several nodes" in (told["drain"] or "")
    capabilities.here.cache_clear()
    monkeypatch.setenv(capabilities.TESTBED_VARIABLE, "1")
    told = capabilities.here()
    assert [told[name] for name in PLACES] == [None] * 4


def test_a_machine_that_refuses_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(label: str, cores: float) -> None:
        raise ClusterError("no control groups for cpu are mounted")

    monkeypatch.setattr(capabilities, "CpuLimit", refuse)
    assert capabilities.here()["cpu_quota"] == "no control groups for cpu are mounted"
    row = next(check for check in doctor() if check.name == "faults: cpu_quota")
    assert not row.ok
    assert not row.needed
    assert row.mend == "no control groups for cpu are mounted"


def test_trying_does_not_import_ray() -> None:
    code = "from rayhive.cluster.node.capabilities import here; import sys"
    code += "; here(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ray" not in done.stdout.split()


def test_what_one_node_lacks_all_lack() -> None:
    lacking = MappingProxyType({**ALL, "mount": "not root"})
    assert capabilities.everywhere([ALL, lacking, ALL]) == {**ALL, "mount": "not root"}
    assert capabilities.everywhere([ALL]) == ALL


def test_kinds_that_cannot_be_done_are_told_all_at_once() -> None:
    available = {**ALL, "node": "needs a testbed", "drain": "one node", "cpu_quota": "not root"}
    wanted = ["kill", "drain_node", "straggler", "drain_node", "stragler"]
    needs = needs_of((kind, {}) for kind in wanted)
    problems = capabilities.missing(needs, available)
    assert [problem.value for problem in problems] == ["drain_node", "straggler", "stragler"]
    text = str(problems[0])
    assert "needs a testbed" in text
    assert "one node" in text
    assert problems[2].nearest == "straggler"
    assert capabilities.missing(needs_of((kind, {}) for kind in wanted[:4]), ALL) == []


@pytest.mark.parametrize("where", ["other", {"choose": ["same", "other"]}])
def test_a_replacement_on_another_node_needs_another_node(where: Any) -> None:
    lonely = {**ALL, "nodes": "this one has one"}
    assert capabilities.missing(needs_of([("kill", {"where": "same"}), ("kill", {})]), lonely) == []
    needs = needs_of([("kill", {}), ("kill", {"where": where})])
    assert needs == {"kill": {"signals", "nodes"}}
    (problem,) = capabilities.missing(needs, lonely)
    assert problem.value == "kill" and "this one has one" in str(problem)
