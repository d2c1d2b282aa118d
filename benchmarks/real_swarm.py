"""A swarm of real peers on this machine: messages, deaths and rounds, for ``many_peers.py``.

Each peer has a trainer, two averagers, a DHT and a network daemon. It prints what happens as lines
of JSON, with the time of the machine's monotonic clock, and takes commands from standard input.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from benchmarks.swarm import ROOT, die_with_parent, join_swarm

#: Rounds that the peers train, and those of them that are measured.
ROUNDS, WARM_UP = 12, 2
BATCH = 4
#: Time in which heartbeats are counted [s], and longest wait for anything [s].
STEADY_S, LIMIT_S = 10.0, 120.0
#: Time between two peeks of a peer at its view [s].
PEEK_S = 0.005


def tell(**fields: Any) -> None:
    """Print an event of this peer."""
    print(json.dumps({"t": time.monotonic(), **fields}), flush=True)


def run_peer(peers: int, initial_peers: list[str]) -> None:
    """Run one peer until it is killed."""
    import torch

    from rayhive.membership import heartbeat
    from rayhive.optim.optimizer import RayhiveOptimizer

    die_with_parent()
    torch.set_num_threads(1)
    passed = [0, 0]  # messages and bytes, both ways

    class Counting(heartbeat.Caller):  # answers
        def receive(self, message: bytes) -> bytes:
            answer = super().receive(message)
            passed[:] = passed[0] + 2, passed[1] + len(message) + len(answer)
            return answer

    class Service(heartbeat.HeartbeatService):  # calls
        async def call(self, peer: bytes, message: bytes) -> bytes:
            answer = await super().call(peer, message)
            passed[:] = passed[0] + 2, passed[1] + len(message) + len(answer)
            return answer

    from rayhive.membership import progress_tracker

    heartbeat.Caller, progress_tracker.HeartbeatService = Counting, Service  # type: ignore[misc]
    dht = join_swarm(initial_peers)
    module = torch.nn.Linear(64, 16)
    optimizer = RayhiveOptimizer(
        dht=dht,
        run_id="real",
        target_batch_size=BATCH * peers,
        batch_size_per_step=BATCH,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
        matchmaking_time=30.0,
        averaging_timeout=60.0,
        on_event=lambda kind, fields: tell(kind=kind, **fields) if kind == "round" else None,
    )
    tell(kind="ready", peer=dht.peer_id.to_bytes().hex())
    view = optimizer.tracker.view

    def watch() -> None:
        seen: frozenset[bytes] = frozenset()
        while True:
            alive = frozenset(view.alive_ids())
            if alive != seen:
                seen = alive
                tell(kind="alive", alive=sorted(each.hex() for each in alive))
            time.sleep(PEEK_S)

    threading.Thread(target=watch, daemon=True).start()
    for command in sys.stdin:
        if command.strip() == "count":
            tell(kind="count", messages=passed[0], bytes=passed[1])
        elif command.strip() == "train":
            if not optimizer.tracker.wait_for_peers(peers, LIMIT_S):
                raise RuntimeError("the other peers do not train")
            while optimizer.local_epoch < ROUNDS:
                optimizer.zero_grad()
                module(torch.randn(BATCH, 64)).square().mean().backward()
                optimizer.step()
            tell(kind="trained")


class RealPeer:
    """One peer in a process of its own, with the events that it has printed.

    Args:
        peers: Size of the swarm.
        initial_peers: Addresses of a peer of the swarm.
        log: File of its errors.
    """

    def __init__(self, peers: int, initial_peers: list[str], log: Any) -> None:
        self.events: list[dict[str, Any]] = []
        arguments = [str(peers), json.dumps(initial_peers)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "HIVEMIND_LOGLEVEL": "ERROR",
                "PYTHONPATH": str(ROOT),
            },
        )
        assert self.process.stdout is not None
        self.addresses: list[str] = json.loads(self.process.stdout.readline())
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.events.append(json.loads(line))

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return its events of a kind."""
        return [event for event in list(self.events) if event["kind"] == kind]

    def ask(self, command: str) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the peer."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @property
    def peer_id(self) -> str:
        """Id of the peer, in hexadecimal."""
        return str(self.of("ready")[0]["peer"])

    def sees(self, count: int) -> bool:
        """Return whether it knows this number of live peers."""
        found = self.of("alive")
        return bool(found) and len(found[-1]["alive"]) == count

    def false_losses(self, since: float, deaths: Mapping[str, float]) -> int:
        """Return how often it took a peer for lost before its death, if it died.

        Args:
            since: Time from which on it knew all peers.
            deaths: Times of death by peer.
        """
        count, seen = 0, set[str]()
        own_end = deaths.get(self.peer_id, math.inf)
        for event in self.of("alive"):
            alive = set(event["alive"])
            if since < event["t"] < own_end:
                count += sum(event["t"] < deaths.get(peer, math.inf) for peer in seen - alive)
            seen = alive
        return count

    def noticed(self, gone: str, since: float) -> float | None:
        """Return the time at which it took a peer for dead, counted from ``since`` [s]."""
        times = [e["t"] for e in self.of("alive") if e["t"] > since and gone not in e["alive"]]
        return min(times) - since if times else None


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds.

    Raises:
        RuntimeError: It never did.
    """
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited too long for {what}")
        time.sleep(0.02)


@contextmanager
def real_swarm(size: int) -> Iterator[list[RealPeer]]:
    """Run a swarm, in which all peers know each other."""
    peers: list[RealPeer] = []
    with tempfile.TemporaryFile("w+") as log:
        try:
            for _ in range(size):
                peers.append(RealPeer(size, peers[0].addresses if peers else [], log))
            wait(lambda: all(peer.of("ready") for peer in peers), "the peers")
            wait(lambda: all(peer.sees(size) for peer in peers), "all peers to know each other")
            yield peers
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read()[-4000:])
            raise
        finally:
            for peer in peers:
                peer.signal(signal.SIGKILL)
                peer.process.wait()


def measure_real(size: int) -> dict[str, list[float]]:
    """Measure a swarm of real peers.

    Returns:
        ``messages`` and ``bytes`` of the heartbeats of each peer [1/s]; ``refused`` and
        ``silent``: time until each other peer noticed the death of a peer whose processes were
        killed, and stopped [s]; ``group``: time of the last peer of each round until it had its
        group [s]; ``round``: time of each round [s]; ``wrong``: how often a peer took a live one
        for lost, since all knew each other.
    """
    with real_swarm(size) as peers:
        found: dict[str, list[float]] = {}
        known, everybody, deaths = time.monotonic(), list(peers), dict[str, float]()
        for peer in peers:
            peer.ask("train")
        wait(lambda: all(peer.of("trained") for peer in peers), "the rounds")
        rounds = [
            [e for peer in peers for e in peer.of("round") if e["round"] == number]
            for number in range(1 + WARM_UP, 1 + ROUNDS)
        ]
        complete = [each for each in rounds if all(e["outcome"] == "averaged" for e in each)]
        found["complete"] = [len(complete) / len(rounds)]
        found["group"] = [min(e["matchmaking_s"] for e in each) for each in complete]
        ends = [max(e["t"] for e in each) for each in rounds]
        found["round"] = np.diff(ends).tolist()

        time.sleep(2.0)
        for pause in (STEADY_S, 0.0):
            for peer in peers:
                peer.ask("count")
            time.sleep(pause)
        wait(lambda: all(len(peer.of("count")) == 2 for peer in peers), "the counts")
        for key in ("messages", "bytes"):
            counts = [peer.of("count") for peer in peers]
            found[key] = [(b[key] - a[key]) / (b["t"] - a["t"]) for a, b in counts]
        for how, number in (("refused", signal.SIGKILL), ("silent", signal.SIGSTOP)):
            victim, *peers = peers[len(peers) // 2 :] + peers[: len(peers) // 2]
            gone, since = victim.peer_id, time.monotonic()
            deaths[gone] = since
            victim.signal(number)
            wait(lambda: all(p.noticed(gone, since) for p in peers), f"a peer to be lost, {how}")  # noqa: B023
            found[how] = [peer.noticed(gone, since) or 0.0 for peer in peers]
            time.sleep(3.0)
            victim.signal(signal.SIGKILL)
        found["wrong"] = [float(sum(peer.false_losses(known, deaths) for peer in everybody))]
        found["wrong"][0] += sum(not peer.sees(len(peers)) for peer in peers)
        return found


if __name__ == "__main__":
    run_peer(int(sys.argv[1]), json.loads(sys.argv[2]))
