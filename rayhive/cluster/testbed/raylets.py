"""Ray on a testbed: a head, and a raylet in the namespace of each node."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rayhive.cluster.embedded import AUTHENTICATION, OBJECT_STORE, daemon_variables
from rayhive.cluster.node.processes import pids
from rayhive.cluster.testbed import entrypoint, namespaces
from rayhive.cluster.testbed.config import NODE_VARIABLE, TESTBED_VARIABLE
from rayhive.cluster.testbed.state import NodeState, TestbedState
from rayhive.errors import ClusterError

#: Name of the head's folder and control group, beside those of the nodes.
HEAD = "head"
_PORT = 6379
_START_TIMEOUT = 180.0
#: Health checks that detect a killed node within seconds, and tolerate a slow one.
_HEALTH = {
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "5",
}


def environment() -> dict[str, str]:
    """Return the environment of the raylets, and so of every process on their nodes.

    It is the environment of this process without the variables of a Ray cluster that this process
    may be part of.
    """
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("RAY_") or key in AUTHENTICATION
    }
    own |= {**daemon_variables(), "RAY_raylet_start_wait_time_s": "120", **_HEALTH}
    own.setdefault("RAY_AUTH_MODE", "token")
    return own


def free_port() -> int:
    """Return a free port, Ray's default port if possible."""
    for port in (_PORT, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise ClusterError("no port is free")


def driver_variables(state: TestbedState) -> dict[str, str]:
    """Return the variables that a driver has to add to its environment to connect.

    ``RAY_AUTH_MODE`` is not among them: Ray reads it when it is imported, and
    :mod:`rayhive.cluster.address` finds it by probing.
    """
    return {
        key: state.environment[key]
        for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
        if key in state.environment and os.environ.get(key) != state.environment[key]
    }


def variables(state: TestbedState, place: str) -> dict[str, str]:
    """Return the environment of the head or of a node.

    Args:
        state: The testbed.
        place: :data:`HEAD`, or the number of the node.
    """
    # Agents and peers keep their files below the folder, where ``down`` finds them.
    found = {**state.environment, TESTBED_VARIABLE: str(state.folder)}
    found["RAY_TMPDIR"] = str(state.folder)
    if place != HEAD:
        found[NODE_VARIABLE] = place
        # A node reaches no name server, and torch's TCPStore looks up the name of every client:
        # by the resolver's defaults that takes 10 s.
        found.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    return found


def start_head(state: TestbedState) -> None:
    """Start the head, which has no CPUs for peers.

    The head is in the machine's own network, on an address of the control plane. Other nodes
    connect back to a driver, so the driver has to be in the network of its node.

    Raises:
        ClusterError: The head does not start.
    """
    options = ["--head", f"--port={state.head_port}", "--num-cpus=0", "--include-dashboard=false"]
    _Raylet(state, None, HEAD, state.head_address, options).start()


def start_nodes(state: TestbedState, nodes: Sequence[NodeState]) -> None:
    """Start the raylets of nodes in parallel.

    Raises:
        ClusterError: A raylet did not start in two attempts.
    """
    raylets = []
    for node in nodes:
        labels = ",".join(f"{key}={value}" for key, value in node.labels.items())
        options = [f"--address={state.address}", f"--num-cpus={node.num_cpus}"]
        options += [f"--labels={labels}"]
        place = str(node.index)
        raylets.append(_Raylet(state, node.namespace, place, node.control_address, options))
    with ThreadPoolExecutor(max(1, len(raylets))) as pool:
        list(pool.map(_Raylet.start, raylets))


def marked(folder: Path) -> list[int]:
    """Return the pids of the processes with a testbed's folder in their environment."""
    mark = f"{TESTBED_VARIABLE}={folder}".encode()
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


@dataclass(frozen=True)
class _Raylet:
    """A ``ray start`` of one node or of the head.

    Attributes:
        state: The testbed.
        namespace: Network namespace; None for the machine's own network.
        place: Name of the folder and control group.
        address: Address on the control plane.
        options: Options of ``ray start``.
    """

    state: TestbedState
    namespace: str | None
    place: str
    address: str
    options: Sequence[str]

    def start(self) -> None:
        """Start it. If that fails, it is started again, as the machine may be busy.

        Raises:
            ClusterError: It failed twice.
        """
        failed = self._failure()
        if failed is None:
            return
        if self.namespace is not None:
            here = [self.namespace]
            namespaces.kill(lambda: namespaces.processes(here))
        else:
            namespaces.kill(lambda: marked(self.state.folder))
        again = self._failure()
        if again is not None:
            text = f"the raylet of {self.place} did not start, tried twice"
            raise ClusterError(f"{text}; first: {failed}; then: {again}")

    def _failure(self) -> str | None:
        """Start it; return None once it runs, or the reason of the failure."""
        state, place = self.state, self.place
        own = state.folder / place
        own.mkdir(exist_ok=True)
        command = [sys.executable, entrypoint.__file__, *self.options]
        command += [f"--node-ip-address={self.address}", f"--temp-dir={own}"]
        command += [f"--object-store-memory={OBJECT_STORE}", "--disable-usage-stats"]
        if state.groups is not None:
            procs = Path(state.groups) / place / "cgroup.procs"
            command = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(procs), *command]
        env = variables(state, place)
        log = Path(tempfile.mkstemp(prefix="start-", suffix=".log", dir=own)[1])

        def run() -> int:
            with log.open("wb") as output:
                return subprocess.run(
                    command,
                    env=env,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    timeout=_START_TIMEOUT,
                ).returncode

        try:
            code = namespaces.inside(self.namespace, run)
        except subprocess.TimeoutExpired:
            why = f"not within {_START_TIMEOUT:g} s"
        else:
            if code == 0:
                return None
            why = f"exit code {code}"
        text = log.read_text(encoding="utf-8", errors="replace").strip()[-1500:]
        return f"{why}\n{text}"
