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

from rayhive.cluster.node.link_faults import LinkTools
from rayhive.cluster.testbed import Testbed, TestbedConfig, namespaces, privilege, state
from rayhive.cluster.testbed.netlink import routes

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


class Agent(LinkTools):
    """What an agent does to the link of one node, in this process."""

    def __init__(self, testbed: Testbed, index: int) -> None:
        self._here = (str(testbed.state.folder), str(index))

    def _place(self) -> tuple[str | None, str | None]:
        return self._here


class FaultTarget:
    """As much of a swarm as link faults touch."""

    def __init__(self, testbed: Testbed) -> None:
        self._agents = {f"node-{n.index}": Agent(testbed, n.index) for n in testbed.nodes}

    async def agent(self, node: str, method: str, *args: Any) -> Any:
        return await getattr(self._agents[node], method)(*args)


def remains(number: int) -> list[str]:
    """Return what there still is of a testbed."""
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
