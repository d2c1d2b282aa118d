"""Changes of one link by several faults: the end of one leaves the others."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.processes import marked
from rayhive.cluster.node.runs import Runs
from rayhive.cluster.node.tools import Toolbox
from rayhive.cluster.testbed.link_changes import LinkChanges
from rayhive.faults.node_tools import Arrived, FlapState, LinkChange
from rayhive.spec import Link

MADE = Link(rate_mbit=100.0, delay_ms=10.0, loss=0.0)


class Veth:
    """A shaped link in memory."""

    now = MADE
    updates = 0

    def update(self, **given: float) -> tuple[Link, Link]:
        self.updates += 1
        before, self.now = self.now, self.now.model_copy(update=given)
        return before, self.now


@dataclass
class OnOneNode:
    """The node of a testbed, and the agents of two studies on it."""

    veth: Veth
    state: Any
    node: Any
    other: int  # a process that lives
    link: NodeLink

    def change_by(self, maker: str, **given: float) -> None:
        """Change the link as another process does."""
        LinkChanges(self.state, self.node).add(maker, given)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> OnOneNode:
    veth, node = Veth(), SimpleNamespace(index=1, link=MADE)
    state = SimpleNamespace(folder=tmp_path, node=lambda number: node)
    monkeypatch.setattr("rayhive.cluster.testbed.state.load", lambda folder: state)
    for module in ("veth", "link_changes"):
        monkeypatch.setattr(f"rayhive.cluster.testbed.{module}.Veth", lambda *_: veth)
    return OnOneNode(veth, state, node, os.getppid(), NodeLink("folder", 1))


@pytest.fixture
def link(here: OnOneNode) -> NodeLink:
    return here.link


def test_an_agent_undoes_only_what_no_other_living_one_has_changed(here: OnOneNode) -> None:
    """An agent belongs to one study; the nodes of a testbed may be shared by several."""
    here.change_by(marked("f0", here.other), rate_mbit=5.0)
    here.change_by(f"{here.other}.1-f0", delay_ms=80.0, loss=0.5)  # its pid was given anew
    here.change_by(marked("f1", here.other), loss=0.1)
    assert asyncio.run(here.link.restore()) == Link(rate_mbit=5.0, delay_ms=10.0, loss=0.1)
    updates = here.veth.updates
    assert asyncio.run(here.link.restore()) == Link(rate_mbit=5.0, delay_ms=10.0, loss=0.1)
    assert here.veth.updates == updates, "packets on their way would be lost"


def test_the_end_of_a_change_leaves_that_of_another_agent(here: OnOneNode) -> None:
    async def go() -> None:
        await here.link.change(LinkChange(rate_mbit=5.0), "f0")
        here.change_by(marked("f0", here.other), rate_mbit=1.0)
        assert (await here.link.undo("f0")).rate_mbit == 1.0

    asyncio.run(go())


def test_a_change_that_was_not_made_is_not_kept(
    here: OnOneNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
            broken.setattr(Veth, "update", lambda self, **_: 1 / 0)
            await here.link.change(LinkChange(rate_mbit=5.0), "f0")
        await here.link.change(LinkChange(rate_mbit=1.0), "f1")
        assert await here.link.undo("f1") == MADE

    asyncio.run(go())


def test_a_link_that_changes_although_its_agent_dies_meanwhile_is_restored(
    here: OnOneNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting is written after the kernel has it."""
    before = Veth.update

    def update(self: Veth, **given: float) -> tuple[Link, Link]:
        (recorded,) = here.state.folder.glob("changes-1.json")
        assert "f0" in recorded.read_text()
        return before(self, **given)

    monkeypatch.setattr(Veth, "update", update)
    here.change_by(f"{here.other}.1-f0", rate_mbit=5.0)
    here.veth.now, updates = MADE, here.veth.updates
    assert asyncio.run(here.link.restore()) == MADE
    assert here.veth.updates == updates + 1


def test_a_flapping_link_is_up_although_another_node_is_cut(tmp_path: Path) -> None:
    runs = Runs()
    runs["run"] = tmp_path

    class Cut(NodeLink):
        """A link to two nodes, of which the first is cut itself."""

        down = False

        async def neighbours(self) -> list[str]:
            return ["10.0.0.2", "10.0.0.3"]

        async def cut(self, name: str, keep: Any = (), direction: str = "both") -> list[str]:
            self.down = True
            return await self.neighbours()

        async def mend(self, name: str) -> int:
            self.down = False
            return 0

        async def reach(self, address: str, count: int = 10, patience_s: float = 1.0) -> Arrived:
            got = 0 if self.down or address == "10.0.0.2" else count
            return Arrived(sent=count, out=got, back=got)

    async def body() -> FlapState:
        toolbox = Toolbox(runs, Cut())
        given = {"down_s": 0.1, "up_s": 0.1, "times": 1}
        state = await toolbox.use("run", "flapping", "f0", "start", given)
        while len(FlapState.model_validate(state).phases) < 2:
            await asyncio.sleep(0.01)
            state = await toolbox.use("run", "flapping", "f0", "state", None)
        await toolbox.release("run")
        return FlapState.model_validate(state)

    down, up = asyncio.run(body()).phases
    assert (down.sent, down.out, down.back) == (10, 0, 0)
    assert (up.sent, up.out, up.back) == (10, 5, 5)


@pytest.mark.parametrize(("first", "left"), [("f0", 1.0), ("f1", 5.0)])
def test_the_end_of_a_fault_leaves_the_other_one_on_its_link(
    link: NodeLink, tmp_path: Path, first: str, left: float
) -> None:
    runs = Runs()
    runs["run"] = tmp_path
    toolbox = Toolbox(runs, link)

    async def use(subject: str, verb: str, change: LinkChange | None = None) -> None:
        given = None if change is None else change.model_dump(mode="json")
        await toolbox.use("run", "link_shaping", subject, verb, given)

    async def go() -> None:
        await use("f0", "start", LinkChange(rate_mbit=5.0))
        await use("f1", "start", LinkChange(rate_mbit=1.0))
        await use("f2", "start", LinkChange(delay_ms=80.0))
        await use(first, "stop")
        assert await link.now() == MADE.model_copy(update={"rate_mbit": left, "delay_ms": 80.0})
        await use("f2", "stop")
        assert await link.now() == MADE.model_copy(update={"rate_mbit": left})
        await use({"f0": "f1", "f1": "f0"}[first], "stop")
        assert await link.now() == MADE

    asyncio.run(go())


def test_a_change_is_undone_by_a_second_attempt(
    link: NodeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go() -> None:
        await link.change(LinkChange(rate_mbit=5.0), "f0")
        with monkeypatch.context() as broken:
            broken.setattr(Veth, "update", lambda self, **_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await link.undo("f0")
        assert await link.undo("f0") == MADE
        await link.change(LinkChange(rate_mbit=5.0), "f0")
        await asyncio.gather(link.undo("f0"), link.change(LinkChange(rate_mbit=1.0), "f1"))
        assert (await link.now()).rate_mbit == 1.0

    asyncio.run(go())


def test_equal_names_of_two_runs_are_two_changes(link: NodeLink, tmp_path: Path) -> None:
    runs = Runs()
    runs["a"] = runs["b"] = tmp_path
    toolbox = Toolbox(runs, link)

    async def go() -> None:
        for run, change in (("a", LinkChange(rate_mbit=5.0)), ("b", LinkChange(delay_ms=80.0))):
            await toolbox.use(run, "link_shaping", "f0", "start", change.model_dump(mode="json"))
        await toolbox.use("a", "link_shaping", "f0", "stop", None)
        assert await link.now() == MADE.model_copy(update={"delay_ms": 80.0})

    asyncio.run(go())


@pytest.mark.parametrize("tool", ["cut", "flapping"])
def test_equal_names_of_two_runs_are_two_cuts(tool: str, tmp_path: Path) -> None:
    class Cuts(NodeLink):
        present: ClassVar[set[str]] = set()

        async def address(self) -> str:
            return "10.0.0.1"

        async def neighbours(self) -> list[str]:
            return []

        async def cut(self, name: str, keep: Any = (), direction: str = "both") -> list[str]:
            self.present.add(name)
            return []

        async def mend(self, name: str) -> int:
            self.present.discard(name)
            return 0

    runs, link = Runs(), Cuts()
    runs["a"] = runs["b"] = tmp_path
    toolbox = Toolbox(runs, link)

    async def go() -> None:
        for number, run in enumerate("ab", 1):
            await toolbox.use(run, tool, "f0", "start", {})
            await asyncio.sleep(0)  # a link flaps in a task
            assert len(link.present) == number
        await toolbox.use("a", tool, "f0", "stop", None)
        assert len(link.present) == 1
        await toolbox.release("b")

    asyncio.run(go())


def test_a_restored_link_has_no_changes_left(link: NodeLink) -> None:
    async def go() -> None:
        await link.change(LinkChange(loss=0.5), "f0")
        assert await link.restore() == MADE
        await link.change(LinkChange(loss=0.1), "f1")
        assert await link.undo("f1") == MADE
        assert await link.undo("f0") == MADE, "nothing is left to undo"

    asyncio.run(go())
