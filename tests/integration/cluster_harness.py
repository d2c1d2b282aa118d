"""Replicates of simulated peers, and a private Ray head for tests of shared clusters."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rayhive.events import Event, read_events
from rayhive.spec.replicate import ReplicateSpec

ROOT = Path(__file__).resolve().parents[2]
FAKE_FORKSERVER = (sys.executable, str(ROOT / "tests" / "integration" / "fake_forkserver.py"))


_trials = itertools.count()


def replicate(folder: Path, study: str = "study", **settings: Any) -> ReplicateSpec:
    """Return a new replicate of two simulated peers.

    Args:
        folder: Folder of the replicate.
        study: Name of its study.
        settings: ``budget``, ``swarm``, ``timeouts``, and options of the simulated peers.
    """
    budget = {
        "seconds_per_replicate": 30,
        "samples_per_replicate": 40,
        **settings.pop("budget", {}),
    }
    swarm = {"peers": 2, "matchmaking_time": 0.5, "averaging_timeout": 1.0}
    swarm |= settings.pop("swarm", {})
    preemption = settings.pop("preemption", {})
    return ReplicateSpec.model_validate(
        {
            "study": study,
            "trial": next(_trials),
            "replicate": 0,
            "workload": {"name": "pretended", "args": {"fake": settings}},
            "swarm": swarm,
            "configuration": {},
            "budget": budget,
            "timeouts": settings.pop("timeouts", {}),
            "preemption": preemption,
            "folder": str(folder),
            "git_revision": "abc1234",
        }
    )


def events_of(spec: ReplicateSpec) -> list[Event]:
    return list(read_events(Path(spec.folder) / "events.jsonl"))


def kinds(events: list[Event], peer: str | None) -> list[str]:
    return [event["kind"] for event in events if event["peer"] == peer]


def pids(spec: ReplicateSpec) -> list[int]:
    return [event["pid"] for event in events_of(spec) if event["kind"] == "peer_spawned"]


def litter(spec: ReplicateSpec) -> list[Path]:
    """Return the present files of a replicate's peers outside their folders."""
    owned = [Path(f"/tmp/hivemind-{pid}-x.sock") for pid in pids(spec)]
    owned += [Path(f"/dev/shm/torch_{pid}_1_0") for pid in pids(spec)]
    return [path for path in owned if path.exists()]


def groups(spec: ReplicateSpec) -> list[int]:
    """Return the living processes in the sessions of the replicate's peers."""
    leaders, found = set(pids(spec)), []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) in leaders and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def eventually(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """Return the first true value of ``condition``; fail if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"did not come true within {seconds} s"
        time.sleep(0.05)
    return found


def training(spec: ReplicateSpec) -> bool:
    """Return whether every peer of the replicate has finished a round."""
    if not (Path(spec.folder) / "events.jsonl").exists():
        return False
    rounds = {event["peer"] for event in events_of(spec) if event["kind"] == "round"}
    return len(rounds) == spec.swarm.peers


def users_of(directory: Path) -> list[int]:
    """Return the processes with ``directory`` in their command lines."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if f"{directory}/" in " ".join(process.cmdline()):
                found.append(process.pid)
    return found


@dataclass
class Driver:
    """A driver in a process of its own."""

    process: subprocess.Popen[str]

    def line(self, start: str) -> str:
        """Return the rest of the next line that starts so."""
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith(start):
                return text.removeprefix(start).strip()
        raise AssertionError(f"the driver ended without {start!r}: {self.process.wait()}")


@contextlib.contextmanager
def driver(code: str, *arguments: str, **environment: str) -> Iterator[Driver]:
    """Run Python code as a driver; kill it at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        start_new_session=True,
    )
    try:
        yield Driver(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@dataclass
class Head:
    """A running Ray head.

    Attributes:
        address: Address of its GCS.
        dashboard: Address of its dashboard, if it has one.
        environment: Variables that a process needs to connect.
    """

    address: str
    dashboard: str
    environment: dict[str, str]


@contextlib.contextmanager
def ray_head(
    folder: Path,
    dashboard: bool = False,
    options: Sequence[str] = (),
    port: int | None = None,
    **environment: str,
) -> Iterator[Head]:
    """Run a Ray head with a private directory and free ports, and end it.

    Args:
        folder: Private directory; a short path.
        dashboard: Whether jobs can be submitted.
        options: Additional options of ``ray start``.
        port: Port of the GCS; None for any free one.
        environment: Variables of the head and of its clients.
    """
    env = {"HOME": str(folder), "RAY_TMPDIR": str(folder), **environment}
    port, web = port or free_port(), free_port()
    own = ["--head", f"--port={port}", f"--dashboard-port={web}", "--num-cpus=4"]
    own += [f"--include-dashboard={str(dashboard).lower()}", f"--temp-dir={folder}/r"]
    own += [f"--ray-client-server-port={free_port()}", *options]
    with _ray_start(folder, "head", own, env):
        yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{web}", env)


@contextlib.contextmanager
def ray_node(
    head: Head,
    folder: Path,
    options: Sequence[str] = (),
    under: Sequence[str] = (),
    **environment: str,
) -> Iterator[None]:
    """Join another node, on this machine, to a running head.

    Args:
        head: The head.
        folder: Of its log.
        options: More options of ``ray start``.
        under: A command that runs it, such as one that drops privileges.
        environment: More variables of the node.
    """
    own = [f"--address={head.address}", *options]
    with _ray_start(folder, "node", own, {**head.environment, **environment}, under):
        yield


@contextlib.contextmanager
def _ray_start(
    folder: Path,
    name: str,
    options: Sequence[str],
    environment: Mapping[str, str],
    under: Sequence[str] = (),
) -> Iterator[None]:
    command = [
        *under,
        sys.executable,
        "-c",
        "from ray.scripts.scripts import main; main()",
        "start",
    ]
    command += ["--block", "--disable-usage-stats", "--object-store-memory=80000000"]
    command += [f"--dashboard-agent-listen-port={free_port()}", *options]
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            start_new_session=True,
        )
    try:
        said = folder / f"{name}.log"
        eventually(lambda: process.poll() is not None or "started" in said.read_text(), 60.0)
        assert process.poll() is None, said.read_text()
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
        if name == "head":
            for pid in users_of(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            eventually(lambda: not users_of(folder), 10.0)


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


#: Part of a script that runs a sweep: connects, and says so.
CONNECT = """
@contextmanager
def connect(address):
    with Cluster.connect(address, forkserver_command=json.loads(forkserver)) as cluster:
        print("connected", flush=True)
        yield cluster
"""
