"""The housekeeping of a node's agent, without Ray."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from rayhive.cluster import actors
from rayhive.cluster.node import agent as agent_module
from rayhive.cluster.node import process_group
from rayhive.cluster.node.agent import AgentOptions, NodeAgent
from rayhive.cluster.node.tools import Toolbox
from tests.integration.cluster_harness import FAKE_FORKSERVER

RUN, SUPERVISOR = "study-t0-r0-none-a0", "supervisor:study:c0de:n0de:1"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder for agents that look at their runs often and have no patience."""
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    monkeypatch.setenv("RAY_TMPDIR", str(path))
    monkeypatch.setattr(agent_module, "_TICK", 0.01)
    monkeypatch.setattr(agent_module, "_IDLE_S", 0.0)

    async def nothing(toolbox: Toolbox) -> None:
        """Leave what other agents of this machine did."""

    monkeypatch.setattr(Toolbox, "recover", nothing)
    yield path
    shutil.rmtree(path)


def ended(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Return the event that the agent has asked for its end."""
    event = asyncio.Event()
    this = SimpleNamespace(leave=SimpleNamespace(remote=event.set))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor=this))
    return event


def supervised(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[Any]:
    """Answer look-ups of the supervisor; return the answers that are left, the last one again."""
    left = list(answers)

    def find(name: str) -> Any:
        assert name == SUPERVISOR
        if isinstance(answer := left.pop(0) if len(left) > 1 else left[0], Exception):
            raise answer
        return answer

    monkeypatch.setattr(actors, "find", find)
    return left


def private(folder: Path) -> list[Path]:
    """Return the agents' private directories."""
    return list(folder.glob(f"{process_group.DIRECTORY_PREFIX}*"))


def test_a_look_up_that_is_not_answered_ends_no_run_and_no_housekeeping(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = supervised(monkeypatch, GetTimeoutError("60 s"), "alive", GetTimeoutError("60 s"))

    async def body() -> None:
        left = ended(monkeypatch)
        agent = NodeAgent(AgentOptions(FAKE_FORKSERVER))
        prepared = await agent.prepare(RUN, ["peer-0"], SUPERVISOR)
        while len(answers) > 1:
            await asyncio.sleep(0.01)
        assert Path(prepared.temporary["peer-0"]).is_dir() and not left.is_set()
        answers.append(None)
        await left.wait()

    asyncio.run(asyncio.wait_for(body(), 20.0))
    assert private(folder) == []


def test_a_cleanup_that_fails_ends_no_housekeeping(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = supervised(monkeypatch, "alive")
    failures = [OSError("busy")]
    release = Toolbox.release

    async def failing(toolbox: Toolbox, run_id: str) -> None:
        if failures:
            raise failures.pop()
        await release(toolbox, run_id)

    monkeypatch.setattr(Toolbox, "release", failing)

    async def body() -> None:
        left = ended(monkeypatch)
        agent = NodeAgent(AgentOptions(FAKE_FORKSERVER))
        await agent.prepare(RUN, ["peer-0"], SUPERVISOR)
        answers.append(None)
        await asyncio.wait_for(left.wait(), 10.0)

    asyncio.run(body())
    assert failures == [] and private(folder) == []


def test_an_agent_whose_end_fails_exits_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(keeper: Any) -> None:
        raise OSError("busy")

    monkeypatch.setattr(agent_module.ForkserverManager, "end", failing)

    async def body() -> None:
        left = ended(monkeypatch)
        NodeAgent(AgentOptions(FAKE_FORKSERVER))
        await asyncio.wait_for(left.wait(), 10.0)

    asyncio.run(body())
