"""A supervisor in miniature: runs a swarm of real peer processes without Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from rayhive.cluster.node.process_group import OwnedProcesses
from rayhive.events import Event, load_event
from rayhive.spec import Budget, Configuration, Evaluation, SwarmConfig, WorkloadConfig
from rayhive.spec.fault_plan import PlannedFault
from rayhive.spec.replicate import PeerSpec

READY_TIMEOUT = 60.0


def digits_peer(
    run_id: str,
    peer: int,
    peers: int,
    *,
    swarm: dict[str, Any],
    configuration: dict[str, Any],
    evaluate_every: int,
    seconds: float = 600,
    samples: int | None = None,
    faults: tuple[PlannedFault, ...] = (),
) -> PeerSpec:
    """Return a peer that trains on digits on the CPU, in a swarm with the settings ``swarm``."""
    return PeerSpec(
        run_id=run_id,
        peer=peer,
        peers=peers,
        seed=3,
        faults=tuple(fault for fault in faults if f"peer-{peer}" in fault.who),
        workload=WorkloadConfig(name="digits"),
        swarm=SwarmConfig(peers=peers, **swarm),
        configuration=Configuration(**configuration),
        budget=Budget(seconds_per_replicate=seconds, samples_per_replicate=samples),
        evaluation=Evaluation(every_samples=evaluate_every),
        accelerator="cpu",
    )


def digits_peers(run_id: str, peers: int, **settings: Any) -> list[PeerSpec]:
    """Return all peers of a swarm; ``settings`` as for :func:`digits_peer`."""
    return [digits_peer(run_id, peer, peers, **settings) for peer in range(peers)]


#: Notified of every line of every peer.
_HEARD = threading.Condition()


class PeerLine:
    """The actor's end of the channel to one peer.

    As in the actor, something reads all the time: a peer whose events nobody reads stands still
    as soon as the socket is full.
    """

    def __init__(self, socket_path: str, spec: PeerSpec, log: Path) -> None:
        self.spec, self.log = spec, log
        self.events: list[Event] = []
        self._heard: list[Event] = []
        self._closed = False
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.connect(socket_path)
        threading.Thread(target=self._listen, name=f"line-of-{spec.name}", daemon=True).start()
        request = {"spec": spec.model_dump(mode="json", by_alias=True), "log": str(log)}
        self._send({**request, "env": {"TMPDIR": str(Path(socket_path).parent)}})
        self.pid = int(self.wait_for("spawned")["pid"])

    def _send(self, message: dict[str, Any]) -> None:
        self.connection.sendall((json.dumps(message) + "\n").encode())

    def _listen(self) -> None:
        channel = self.connection
        with contextlib.suppress(OSError), channel, channel.makefile(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n") and line.strip():  # not half a line of a killed peer
                    message = json.loads(line)
                    with _HEARD:
                        self._heard.append(message if "t" not in message else load_event(line))
                        _HEARD.notify_all()
        with _HEARD:
            self._closed = True
            _HEARD.notify_all()

    def close(self) -> None:
        """Close the channel, as the death of the actor does."""
        with contextlib.suppress(OSError):  # the peer has closed it
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def command(self, do: str, **fields: Any) -> None:
        self._send({"do": do, **fields})

    def wait_for(self, kind: str, timeout: float = READY_TIMEOUT) -> Event:
        """Return the first event of this kind; fail on a failed peer."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self.events:
                if event["kind"] == kind:
                    return event
            assert all(event["kind"] != "peer_failed" for event in self.events), self.story()
            assert all(event["kind"] != "exited" for event in self.events), self.story()
            self.read(deadline - time.monotonic(), kind)

    def read(self, timeout: float, kind: str) -> None:
        """Take the events that came; fail if none comes within a time."""
        read_any([self], timeout, kind)

    @property
    def has_news(self) -> bool:
        """Whether there are events to take, or the peer has closed the channel."""
        return self._closed or len(self._heard) > len(self.events)

    def take(self, kind: str) -> None:
        """Take the events that came; fail if the peer has closed the channel."""
        news = self._heard[len(self.events) :]
        assert news, f"the line was closed before {kind}\n{self.story()}"
        self.events += news

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]

    def story(self) -> str:
        shown = [
            {key: value for key, value in dict(event).items() if key not in ("sketch", "shapes")}
            for event in self.events[-12:]
        ]
        log = self.log.read_text()[-3000:] if self.log.exists() else "(no log)"
        return "\n".join([*map(str, shown), log])


def read_any(lines: list[PeerLine], timeout: float, kind: str) -> None:
    """Take what the peers said; fail if none says anything within a time."""
    with _HEARD:
        heard = _HEARD.wait_for(lambda: any(line.has_news for line in lines), timeout)
    assert heard, f"no {kind} in time\n" + "\n\n".join(line.story() for line in lines)
    for line in lines:
        if line.has_news:
            line.take(kind)


@contextlib.contextmanager
def forkserver() -> Iterator[str]:
    """Run a forkserver, yield the path of its socket, and end it with all its peers."""
    with tempfile.TemporaryDirectory(prefix="rayhive-z") as folder:
        yield from _forkserver(f"{folder}/z")


def _forkserver(path: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "rayhive.peer.forkserver", path],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + READY_TIMEOUT
        while True:
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with contextlib.closing(probe):
                if probe.connect_ex(path) == 0:
                    probe.sendall(b"\n")  # refused: not a request
                    break
            assert process.poll() is None, "the forkserver died at start"
            assert time.monotonic() < deadline, "the forkserver does not listen"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        yield path
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def kill_groups(*leaders: int) -> float:
    """Kill peers with all their processes at once; return the time [s on the wall clock].

    The remains of the peers are removed, as by the agent of a node.
    """
    owned = [OwnedProcesses(leader=leader) for leader in leaders]
    for each in owned:
        each.note()
    members = [psutil.Process(pid) for each in owned for pid in each.living()]
    for leader in leaders:
        os.killpg(leader, signal.SIGKILL)
    killed = time.time()
    psutil.wait_procs(members, timeout=10)
    for each in owned:
        each.remove()
    return killed


def start_swarm(socket_path: str, specs: list[PeerSpec], folder: Path) -> list[PeerLine]:
    """Start every peer and return when all of them train."""
    lines = [PeerLine(socket_path, spec, folder / f"{spec.name}.log") for spec in specs]
    lines[0].command("start", initial_peers=[])
    addresses = lines[0].wait_for("dht_ready")["addresses"]
    for line in lines[1:]:
        line.command("start", initial_peers=addresses)
    for line in lines:
        line.wait_for("peer_ready")
    for line in lines:
        line.command("train")
    for line in lines:
        line.wait_for("training_started")
    return lines


def finish_swarm(lines: list[PeerLine], timeout: float = 60.0) -> None:
    """Wait until every peer has finished, and release them all."""
    for line in lines:
        line.wait_for("peer_finished", timeout)
    for line in lines:
        line.command("shutdown")
    for line in lines:
        exited = _wait_exit(line)
        assert exited["exit_code"] == 0, line.story()


def _wait_exit(line: PeerLine) -> Event:
    deadline = time.monotonic() + 30
    while not line.of("exited"):
        line.read(deadline - time.monotonic(), "exited")
    return line.of("exited")[0]
