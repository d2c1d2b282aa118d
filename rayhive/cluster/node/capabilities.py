"""Capabilities of this machine for faults; each one is tried."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rayhive.cluster.node import cgroups, machine
from rayhive.cluster.node.cgroups import CpuLimit
from rayhive.cluster.node.tools.memory_hog import free_memory
from rayhive.cluster.node.tools.small_disk import SmallDisk
from rayhive.cluster.testbed.config import TESTBED_VARIABLE
from rayhive.errors import ClusterError, Problem, unknown
from rayhive.faults.target import CAPABILITIES
from rayhive.registry import FAULTS

NEEDS_TESTBED = "needs a testbed: rayhive testbed up FILE"


@functools.cache
def here() -> Mapping[str, str | None]:
    """Return None for each capability, or the reason why this machine lacks it.

    Each is tried once per process. Nothing of the trial remains.
    """
    found = {}
    for name in CAPABILITIES:
        try:
            found[name] = _PROBES[name]()
        except (OSError, ClusterError, subprocess.SubprocessError) as error:
            found[name] = str(error)
    return MappingProxyType(found)


def everywhere(nodes: Iterable[Mapping[str, str | None]]) -> dict[str, str | None]:
    """Return None for each capability that all nodes have, else the reason of a node without it."""
    known = list(nodes)
    return {
        name: next((reason for node in known if (reason := node.get(name)) is not None), None)
        for name in CAPABILITIES
    }


def missing(
    needs: Mapping[str, Collection[str]], available: Mapping[str, str | None]
) -> list[Problem]:
    """Return the fault kinds that lack a capability, each with the reason.

    Args:
        needs: Kind -> capabilities that it needs. An unknown kind is a problem, too.
        available: Result of :func:`here` or :func:`everywhere`.
    """
    problems = []
    for name, wanted in needs.items():
        if name not in FAULTS:
            problems.append(unknown("kind", name, FAULTS.names()))
            continue
        lacking = [
            f"to {CAPABILITIES[need]} ({available[need]})"
            for need in sorted(wanted)
            if available.get(need) is not None
        ]
        if lacking:
            problems.append(Problem("kind", name, f"it has {' and '.join(lacking)}"))
    return problems


def _signals() -> str | None:
    with _sleeper() as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        process.send_signal(signal.SIGCONT)
    return None


def _cpu_quota() -> str | None:
    with _sleeper() as process:
        limit = CpuLimit(f"probe-{process.pid}", 0.5)
        try:
            if limit.add([process.pid]) != cgroups.members(limit.folder):
                raise ClusterError("a process can't be moved into a control group")
            limit.stat()
        finally:
            limit.release()
    return None


def _memory() -> str | None:
    return None if free_memory() > 0 else "no memory is free besides a reserve"


def _mount() -> str | None:
    base = machine.short_temporary_directory()
    with tempfile.TemporaryDirectory(prefix="rhm-", dir=base) as folder:
        disk = SmallDisk(Path(folder) / "disk", 2**20)
        try:
            disk.fill()
            error = disk.state().error
        finally:
            disk.release()
    return None if error == "ENOSPC" else f"a full file system gives {error}"


def _testbed() -> str | None:
    """Require a testbed on a cluster; without a cluster, require that one can be made."""
    if os.environ.get(TESTBED_VARIABLE):
        return None
    if _cluster() is not None:
        return NEEDS_TESTBED
    from rayhive.cluster.testbed import privilege

    return privilege.lacking()


def _cluster() -> Any:
    """Return the module of Ray if this process is connected to a cluster, else None."""
    ray = sys.modules.get("ray")  # a connected process has imported it
    return ray if ray is not None and ray.is_initialized() else None


def _several() -> str | None:
    """Require a second node, to start a peer on or to drain: Ray's head node has to stay."""
    if os.environ.get(TESTBED_VARIABLE):
        return None
    ray = _cluster()
    if ray is None:
        return _testbed()
    living = [node for node in ray.nodes() if node["Alive"]]
    return None if len(living) > 1 else "needs a cluster of several nodes; this one has one"


_PROBES: dict[str, Callable[[], str | None]] = {
    "signals": _signals,
    "cpu_quota": _cpu_quota,
    "memory": _memory,
    "mount": _mount,
    "link": _testbed,
    "node": _testbed,
    "nodes": _several,
    "drain": _several,
}


@contextlib.contextmanager
def _sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
