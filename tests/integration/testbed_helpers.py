"""Nodes of a testbed without Ray on them, and agents that need no actor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.runs import Runs
from rayhive.cluster.node.tools import Toolbox
from rayhive.cluster.testbed import Testbed, TestbedConfig, namespaces, privilege, state
from rayhive.cluster.testbed.namespaces import routes
from rayhive.faults.node_tools import Verb

LACKING = privilege.lacking()
needs_testbed = pytest.mark.skipif(LACKING is not None, reason=f"no testbed here: {LACKING}")


def config(*links: dict[str, float], **fields: Any) -> TestbedConfig:
    """Return a testbed with a node for each link."""
    classes = {f"n{number}": {"link": link} for number, link in enumerate(links)}
    name = f"test-{os.getpid()}"
    return TestbedConfig.model_validate({"name": name, "node_classes": classes, **fields})


@contextmanager
def bare(*links: dict[str, float], **fields: Any) -> Iterator[Testbed]:
    with Testbed(config(*links, **fields), ray=False) as testbed:
        yield testbed


def link_of(testbed: Testbed, index: int) -> NodeLink:
    """Return the link of one node, as its agent has it."""
    return NodeLink(str(testbed.state.folder), index)


class FaultTarget:
    """The part of a swarm that link faults use."""

    def __init__(self, testbed: Testbed) -> None:
        self._toolboxes = {}
        for node in testbed.nodes:
            runs = Runs()
            runs["run"] = testbed.state.folder
            toolbox = Toolbox(runs, link_of(testbed, node.index))
            self._toolboxes[f"node-{node.index}"] = toolbox

    async def answers(self, node: str) -> bool:
        return node in self._toolboxes

    async def use_tool(
        self, node: str, tool: Any, subject: str, verb: Verb, args: Any = None
    ) -> Any:
        given = None if args is None else args.model_dump(mode="json")
        answer = await self._toolboxes[node].use("run", tool.name, subject, verb, given)
        return None if answer is None else tool.state.model_validate(answer)


def remains(number: int) -> list[str]:
    """Return a text for each remaining part of a testbed."""
    prefix = f"rht{number}"
    found = [f"namespace {name}" for name in namespaces.named(f"{prefix}-")]

    def interfaces() -> list[str]:
        with routes() as ip:
            return [str(link.get("ifname")) for link in ip.get_links()]

    names = namespaces.inside(None, interfaces)
    found += [f"interface {n}" for n in names if n == prefix or n.startswith(f"{prefix}-")]
    folder = state.folder_of(number)
    found += [str(folder)] if folder.exists() else []
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{prefix}")]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if f"{folder}/".encode() in line:
            found.append(f"process {line!r}")
    return found


def busy(namespace: str) -> subprocess.Popen[bytes]:
    """Start a process that stays in a namespace."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    return namespaces.inside(namespace, lambda: subprocess.Popen(command))
