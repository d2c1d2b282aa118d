"""The contract of node tools, over the registry: start has an effect, stop undoes it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rayhive.cluster.node import capabilities, process_group
from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.tools import NODE_TOOLS, OfferedTool, Toolbox
from rayhive.cluster.node.tools.base import Tool
from rayhive.cluster.node.tools.cpu_limit import CpuLimitTool
from rayhive.cluster.node.tools.cut import CutTool
from rayhive.errors import ClusterError, RayhiveError
from rayhive.faults import node_tools
from rayhive.faults.node_tools import (
    CPU_LIMIT,
    CUT,
    Arrived,
    CpuUsage,
    CutState,
    LinkChange,
    LinkMeasurement,
    NodeTool,
)
from rayhive.spec import Link, Model
from tests.unit.fault_fakes import RUN, FakeSwarm, my_groups

TOOLS = [pytest.param(name, offered, id=name) for name, offered in NODE_TOOLS.items()]
INTERFACES = {tool.name: tool for tool in vars(node_tools).values() if isinstance(tool, NodeTool)}


MADE = Link(rate_mbit=100.0, delay_ms=10.0)


@dataclass
class FakeLink(NodeLink):
    """A link in memory, with one other node."""

    made: Link = MADE
    set_to: Link = MADE
    cuts: dict[str, str] = field(default_factory=dict)
    changes: dict[str, dict[str, float]] = field(default_factory=dict)

    async def address(self) -> str:
        return "10.0.0.1"

    async def neighbours(self) -> list[str]:
        return ["10.0.0.2"]

    async def now(self) -> Link:
        return self.set_to

    async def change(self, to: LinkChange, name: str = "") -> Link:
        before = self.set_to
        self.changes[name] = to.model_dump(exclude_none=True)
        self.set_to = before.model_copy(update=self.changes[name])
        return before

    async def undo(self, name: str) -> Link:
        made = self.made.model_dump()
        given = {key: made[key] for key in self.changes.pop(name, {})}
        self.set_to = self.set_to.model_copy(update=given)
        return self.set_to

    async def restore(self) -> Link:
        self.changes.clear()
        self.set_to = self.made
        return self.set_to

    async def measure(self, *what: str) -> LinkMeasurement:
        return LinkMeasurement(rate_up_mbit=self.set_to.rate_mbit)

    async def cut(self, name: str, keep: Any = (), direction: str = "both") -> list[str]:
        self.cuts[name] = direction
        return await self.neighbours()

    async def mend(self, name: str) -> int:
        return 3 if self.cuts.pop(name, None) else 0

    async def reach(self, address: str, count: int = 10, patience_s: float = 1.0) -> Arrived:
        arrived = 0 if self.cuts else count
        return Arrived(sent=count, out=arrived, back=arrived)


@dataclass(frozen=True)
class Case:
    """How to try a tool: its subject (``leader`` or a name), arguments, and the trace of it."""

    subject: str
    args: dict[str, Any]
    effect: Callable[[FakeLink, Path], object]
    needs: str | None = None


def _mounts(link: FakeLink, folder: Path) -> object:
    return process_group.mounts_below(folder)


CASES = {
    "cpu_limit": Case("leader", {"cores": 0.1}, lambda *_: my_groups(), "cpu_quota"),
    "memory_hog": Case("node-1", {"size": 4096}, lambda *_: _holders(), "memory"),
    "small_disk": Case("leader", {"folder": "checkpoints", "size": 2**20}, _mounts, "mount"),
    "link_shaping": Case(
        "f0", {"rate_mbit": 5.0}, lambda link, _: link.set_to.rate_mbit != link.made.rate_mbit
    ),
    "cut": Case("f0", {}, lambda link, _: link.cuts),
    "flapping": Case("f0", {"down_s": 30.0, "up_s": 30.0}, lambda link, _: link.cuts),
}


def _holders() -> list[str]:
    """Return the processes that hold memory for this one."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"oom_score_adj" in command:
                found.append(pid)
    return found


def check_offer(name: str, offered: OfferedTool) -> None:
    """The tool is complete."""
    implementation = offered.implementation
    missing = sorted(getattr(implementation, "__abstractmethods__", ()))
    assert not inspect.isabstract(implementation), f"{name} lacks {', '.join(missing)}"
    assert offered.interface.name == name
    assert INTERFACES.get(name) is offered.interface, f"no interface is declared for {name}"
    for model in (offered.interface.args, offered.interface.state):
        assert issubclass(model, Model) and inspect.getdoc(model)
    assert name in CASES, f"no case is written for {name}"


async def check_use(name: str, folder: Path) -> None:
    """Start has an effect, state shows it, stop and the end of the run undo it."""
    case = CASES[name]
    async with FakeSwarm(folder) as swarm:
        link = FakeLink()
        toolbox = Toolbox(swarm.runs, link)
        leader = str(swarm.incarnations["peer-1"].process.pid)
        subject = leader if case.subject == "leader" else case.subject
        state = NODE_TOOLS.get(name).interface.state
        assert await toolbox.use(RUN, name, subject, "stop") is None
        for end in ("stop", "release"):
            state.model_validate(await toolbox.use(RUN, name, subject, "start", case.args))
            await asyncio.sleep(0.05)  # for tools that act in the background
            assert case.effect(link, folder), f"{name} has no effect"
            assert toolbox.in_use() == [(RUN, name, subject)]
            state.model_validate(await toolbox.use(RUN, name, subject, "state"))
            if end == "stop":
                await toolbox.use(RUN, name, subject, "stop")
            else:
                await toolbox.release(RUN)
            assert not case.effect(link, folder), f"{name} is not undone by {end}"
            assert toolbox.in_use() == []
        swarm.runs.remove(RUN)
        with pytest.raises(RayhiveError, match="not on this node"):
            await toolbox.use(RUN, name, subject, "start", case.args)


def test_every_interface_is_offered_and_tried() -> None:
    assert INTERFACES.keys() == set(NODE_TOOLS.names()) == CASES.keys()


@pytest.mark.parametrize(("name", "offered"), TOOLS)
def test_it_is_complete(name: str, offered: OfferedTool) -> None:
    check_offer(name, offered)


@pytest.mark.parametrize(("name", "offered"), TOOLS)
def test_it_has_an_effect_until_it_is_stopped(
    name: str, offered: OfferedTool, tmp_path: Path
) -> None:
    need = CASES[name].needs
    if need is not None and (reason := capabilities.here()[need]) is not None:
        pytest.skip(f"{need}: {reason}")
    asyncio.run(check_use(name, tmp_path))


@pytest.mark.parametrize(("name", "offered"), TOOLS)
def test_the_docs_have_it(name: str, offered: OfferedTool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    assert f"| `{name}` |" in page


# -- tools that are half finished are found ------------------------------------------------------


class WithoutStop(Tool[Any, CpuUsage]):
    """A tool without stop."""

    async def start(self, args: Any) -> CpuUsage:
        return await self.state()

    async def state(self) -> CpuUsage:
        return CpuUsage(periods=0, throttled=0, throttled_s=0.0)


class IdleStop(CutTool):
    """A tool whose stop does nothing."""

    async def stop(self) -> CutState:
        return CutState(address="10.0.0.1")


class IdleStart(CpuLimitTool):
    """A tool whose start does nothing."""

    async def start(self, args: Any) -> CpuUsage:
        return CpuUsage(periods=0, throttled=0, throttled_s=0.0)


def test_a_tool_without_stop_is_found() -> None:
    with pytest.raises(AssertionError, match="cpu_limit lacks stop"):
        check_offer("cpu_limit", OfferedTool(CPU_LIMIT, WithoutStop))


def test_a_tool_without_an_interface_is_found() -> None:
    other: NodeTool[Any, Any] = NodeTool("other", Model, Model)
    with pytest.raises(AssertionError, match="no interface is declared"):
        check_offer("other", OfferedTool(other, CpuLimitTool))


@pytest.mark.parametrize(
    ("interface", "implementation", "text"),
    [(CUT, IdleStop, "not undone by stop"), (CPU_LIMIT, IdleStart, "has no effect")],
)
def test_a_tool_that_does_nothing_is_found(
    interface: NodeTool[Any, Any], implementation: type[Tool[Any, Any]], text: str, tmp_path: Path
) -> None:
    offered = OfferedTool(interface, implementation)
    with (
        NODE_TOOLS.replaced(interface.name, offered),
        pytest.raises(AssertionError, match=text),
    ):
        asyncio.run(check_use(interface.name, tmp_path))


def test_a_failed_start_leaves_nothing_to_stop(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            toolbox = Toolbox(swarm.runs, FakeLink())
            with pytest.raises(ClusterError, match="besides a reserve"):
                await toolbox.use(RUN, "memory_hog", "node-1", "start", {"size": 2**60})
            assert toolbox.in_use() == []

    asyncio.run(scene())
