"""The Ray cluster of a testbed: a head and a raylet per node, each in its own namespace."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rayhive.cluster.embedded import import_paths
from rayhive.cluster.testbed import launch, namespaces
from rayhive.cluster.testbed.config import NODE_VARIABLE, TESTBED_VARIABLE
from rayhive.cluster.testbed.state import NodeState, TestbedState
from rayhive.errors import ClusterError

#: The head's place among the folders and control groups of the nodes.
HEAD = "head"
_PORT = 6379
_OBJECT_STORE = 80 * 2**20  # the least that Ray takes; nothing large goes through it
_START_TIMEOUT = 180.0
_AUTHENTICATION = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
#: One for all testbeds of this process: Ray reads it once and keeps it.
_TOKEN = secrets.token_hex(32)
#: A node that was killed shall be known as dead within seconds; one that is slow may live.
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}


def environment() -> dict[str, str]:
    """Return what raylets, and with them all that runs on their nodes, are started with.

    It is this process's own, without what belongs to another cluster that it may be part of.
    """
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("RAY_") or key in _AUTHENTICATION
    }
    own |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "1",
        "PYTHONPATH": os.pathsep.join(import_paths()),
        "RAY_raylet_start_wait_time_s": "120",
        **_HEALTH,
    }
    if not any(name in own for name in _AUTHENTICATION):
        own["RAY_AUTH_TOKEN"] = _TOKEN
    own.setdefault("RAY_AUTH_MODE", "token")
    return own


def free_port() -> int:
    """Return a port that nobody listens on, the usual one if it is free."""
    for port in (_PORT, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise ClusterError("no port is free")


def driver_variables(state: TestbedState) -> dict[str, str]:
    """Return what a driver needs in its environment to be let in, beside its own.

    The mode is not among it: Ray reads that when it is imported, and whoever joins finds it out.
    """
    return {
        key: state.environment[key]
        for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
        if key in state.environment and os.environ.get(key) != state.environment[key]
    }


def start_head(state: TestbedState) -> None:
    """Start the head, which has no room for peers.

    It is in the machine's own network, on an address of the control plane: a driver is what
    others call back, so it has to be where its node is.

    Raises:
        ClusterError: It does not start.
    """
    options = ["--head", f"--port={state.head_port}", "--num-cpus=0", "--include-dashboard=false"]
    _wait(_start(state, None, HEAD, state.head_address, options))


def start_nodes(state: TestbedState, nodes: Sequence[NodeState]) -> None:
    """Start the raylets of some nodes at once.

    Raises:
        ClusterError: One does not start.
    """
    started = []
    for node in nodes:
        labels = ",".join(f"{key}={value}" for key, value in node.labels.items())
        options = [f"--address={state.address}", f"--num-cpus={node.num_cpus}"]
        options += [f"--labels={labels}"]
        place = str(node.index)
        started.append(_start(state, node.namespace, place, node.control_address, options))
    for each in started:
        _wait(each)


def group(state: TestbedState, node: NodeState) -> Path | None:
    """Return the control group of a node, if nodes have any."""
    return None if state.groups is None else Path(state.groups) / str(node.index)


class _Starting:
    """A ``ray start`` that runs."""

    def __init__(self, what: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.what, self.process, self.log = what, process, log


def _start(
    state: TestbedState, namespace: str | None, place: str, address: str, options: Sequence[str]
) -> _Starting:
    own = state.folder / place
    own.mkdir(exist_ok=True)
    command = [sys.executable, launch.__file__, *options, f"--node-ip-address={address}"]
    command += [f"--temp-dir={own}", f"--object-store-memory={_OBJECT_STORE}"]
    command += ["--disable-usage-stats"]
    if state.groups is not None:
        procs = Path(state.groups) / place / "cgroup.procs"
        command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(procs), *command]
    # Agents keep what they and their peers make below the folder, where down finds it.
    env = {**state.environment, TESTBED_VARIABLE: str(state.folder)}
    env["RAY_TMPDIR"] = str(state.folder)
    if place != HEAD:
        env[NODE_VARIABLE] = place
    log = Path(tempfile.mkstemp(prefix="start-", suffix=".log", dir=own)[1])

    def run() -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    return _Starting(place, namespaces.inside(namespace, run), log)


def _wait(started: _Starting) -> None:
    try:
        code = started.process.wait(_START_TIMEOUT)
    except subprocess.TimeoutExpired:
        started.process.kill()
        started.process.wait()
        code = -1
    if code:
        text = started.log.read_text(encoding="utf-8", errors="replace").strip()[-1500:]
        raise ClusterError(f"the raylet of {started.what} did not start ({code}):\n{text}")
