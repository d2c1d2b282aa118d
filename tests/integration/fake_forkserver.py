"""Forkserver of simulated peers: the protocol of the real one, with rounds of milliseconds.

Run as ``python fake_forkserver.py SOCKET``. The behaviour of a peer is in ``workload.args.fake`` of
its spec, see ``DEFAULTS``. Like a real peer it forks a child that holds the channel, listens on a
hivemind socket and owns shared memory, and does not remove them when it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

DEFAULTS: dict[str, Any] = {
    "rounds": 5,  # then it is finished; null: only a command to stop ends it
    "round_s": 0.02,
    "startup_s": 0.0,  # from the command to start to dht_ready
    "reason": "rounds",  # of peer_finished
    "peers": {},  # these settings again, for single peers by number
    "fail": None,  # "start": peer_failed instead of dht_ready; a number: in that round
    "die": None,  # [where, signal or exit code]; where as in "fail"
    "deaf": False,  # ignores commands to stop and to shut down
    "litter": True,
    "evaluate": None,  # loss of the held-out evaluation after every round
    "says": "",  # to its log
}


class Peer:
    def __init__(self, connection: socket.socket, spec: dict[str, Any]) -> None:
        self.connection = connection
        self.spec = spec
        later = f".{spec['incarnation']}" if spec["incarnation"] else ""
        self.name = f"peer-{spec['peer']}{later}"
        given = spec["workload"]["args"].get("fake", {})
        own = given.get("peers", {}).get(str(spec["peer"]), {})
        self.fake = {**DEFAULTS, **given, **own}
        self.commands: list[dict[str, Any]] = []
        self.news = threading.Condition()
        self.sockets: list[socket.socket] = []
        self.child = 0

    def run(self) -> None:
        threading.Thread(target=self.read, daemon=True).start()
        self.emit("spawned", pid=os.getpid())
        print(self.fake["says"], flush=True)
        start = self.wait_for("start")
        if self.spec["peer"] > 0 and not start["initial_peers"]:
            raise RuntimeError("no initial peers")
        time.sleep(self.fake["startup_s"])
        if self.fake["litter"]:
            self.litter()
        self.trouble("start")
        address = f"/ip4/{self.spec['host']}/tcp/1/p2p/{self.name}"
        self.emit("dht_ready", peer_id=self.name, addresses=[address])
        self.emit(
            "peer_ready",
            shapes=[[2, 3]],
            batch_size=4,
            target=None,
            data="real",
            versions={},
            hardware="",
            device=os.environ.get("CUDA_VISIBLE_DEVICES"),
            processes={"trainer": os.getpid(), **({"p2pd": self.child} if self.child else {})},
        )
        self.wait_for("train")
        self.emit("training_started")
        self.train()
        if not self.fake["deaf"]:
            self.wait_for("shutdown")
            os._exit(0)
        time.sleep(600)

    def train(self) -> None:
        done, reason = 0, self.fake["reason"]
        while self.fake["rounds"] is None or done < self.fake["rounds"]:
            if self.stopping(self.fake["round_s"]):
                reason = "notice" if self.leaves(done) else "stop"
                break
            done += 1
            self.trouble(done)
            clock = done * self.fake["round_s"]
            group = {"group_size": self.spec["peers"], "outcome": "averaged", "fraction": 1.0}
            self.emit("round", round=done, samples=4, loss=1 / done, clock_s=clock, **group)
            self.emit("transition", round=done, seconds=self.fake["round_s"], clock_s=clock)
            if (loss := self.fake["evaluate"]) is not None:
                self.emit("evaluation", round=done, clock_s=clock, values={"loss": loss})
        self.emit("peer_finished", reason=reason, round=done, samples=4 * done, clock_s=0.1)

    def stopping(self, seconds: float) -> bool:
        ending = ("stop", "notice", "leave")
        with self.news:
            return self.news.wait_for(
                lambda: not self.fake["deaf"] and any(c["do"] in ending for c in self.commands),
                seconds,
            )

    def leaves(self, done: int) -> bool:
        """Say goodbye if this peer was given notice."""
        for given in self.commands:
            if given["do"] in ("notice", "leave"):
                about = {"deadline_s": given.get("deadline_s"), "source": given["source"]}
                self.emit("notice", **about)
                self.emit("left", round=done, handed_over=4, lost=0)
                return True
        return False

    def trouble(self, where: object) -> None:
        if self.fake["fail"] == where:
            self.emit("peer_failed", error="RuntimeError('told to fail')", traceback="...")
            sys.stderr.flush()
            os._exit(1)
        if self.fake["die"] is not None and self.fake["die"][0] == where:
            print("told to die", file=sys.stderr, flush=True)
            code = self.fake["die"][1]
            if code < 0:
                os.kill(os.getpid(), -code)
            os._exit(code)

    def litter(self) -> None:
        # hivemind's sockets are in the peer's directory, or have its pid in their names.
        for path in (
            f"{os.environ['TMPDIR']}/hivemind-x.sock",
            f"/tmp/hivemind-{os.getpid()}-x.sock",
        ):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen()
            self.sockets.append(listener)
        with open(f"/dev/shm/torch_{os.getpid()}_1_0", "wb") as file:
            file.write(b"\0" * 64)
        with open(os.path.join(os.environ["TMPDIR"], "scratch"), "wb") as file:
            file.write(b"\0")
        self.child = os.fork()
        if self.child == 0:
            time.sleep(600)
            os._exit(0)

    def emit(self, kind: str, **fields: Any) -> None:
        event = {"kind": kind, "t": time.time(), "peer": self.name, **fields}
        self.connection.sendall(json.dumps(event).encode() + b"\n")

    def wait_for(self, do: str) -> dict[str, Any]:
        with self.news:
            self.news.wait_for(lambda: any(c["do"] == do for c in self.commands))
            return next(c for c in self.commands if c["do"] == do)

    def read(self) -> None:
        for line in self.connection.makefile():
            with self.news:
                self.commands.append(json.loads(line))
                self.news.notify_all()
        os.killpg(os.getpgrp(), signal.SIGKILL)


def serve(path: str) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    alarm, ring = os.pipe()
    os.set_blocking(ring, False)
    signal.set_wakeup_fd(ring)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    peers: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([server, alarm, 0], [], [])
        if 0 in ready and not os.read(0, 4096):
            break
        if alarm in ready:
            os.read(alarm, 4096)
        reap(peers)
        if server in ready:
            connection, _ = server.accept()
            line = connection.makefile().readline()
            if not line:  # a look whether we listen
                connection.close()
                continue
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                os.setsid()
                log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ.update(request["env"])
                for other in peers.values():
                    other.close()
                server.close()
                try:
                    Peer(connection, request["spec"]).run()
                finally:
                    os._exit(1)
            peers[pid] = connection
    for pid in peers:
        os.killpg(pid, signal.SIGKILL)
    os.unlink(path)


def reap(peers: dict[int, socket.socket]) -> None:
    while peers:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        connection = peers.pop(pid)
        if not os.environ.get("FAKE_FORKSERVER_IS_SILENT"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # forks of the peer
            code = os.waitstatus_to_exitcode(status)
            last = {"kind": "exited", "pid": pid, "exit_code": code}
            with contextlib.suppress(OSError):
                connection.sendall(f"\n{json.dumps(last)}\n".encode())
        connection.close()


if __name__ == "__main__":
    serve(sys.argv[1])
