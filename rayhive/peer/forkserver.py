"""Forkserver: a warm process per node from which peer processes are forked.

Importing torch and Lightning takes seconds of a core for every peer of every replicate; a fork of a
process that has imported them takes milliseconds. hivemind's modules create locks at import, which
all peers of the node would share: a peer that is killed while it holds one would block the other
peers. Each peer therefore begins by replacing them (:mod:`rayhive.strategy.forked_locks`).

Run as ``python -m rayhive.peer.forkserver SOCKET``. For each connection it reads one JSON line
``{"spec": ..., "log": ..., "env": {...}}`` and forks a peer that keeps the connection. When the
peer ends, ``{"kind": "exited", "pid": ..., "exit_code": ...}`` is the last line on it. The
forkserver and its peers end when its standard input is closed, or on SIGTERM.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

#: Modules that most peers need; one that is not installed is skipped.
PRELOAD = (
    "torch",
    "lightning.pytorch",
    "sklearn.datasets",
    "sklearn.model_selection",
    "rayhive.peer.process",
    "rayhive.peer.from_spec",
    "rayhive.peer.replicate_monitor",
    "rayhive.strategy.dht",
    "rayhive.strategy.forked_locks",
    "rayhive.workloads.loading",
    "rayhive.compression.kernels.eight_bit_numba",
    "rayhive.compression.powersgd.kernels_numba",
    "hivemind.utils.multiaddr.codecs.cid",
    "hivemind.utils.multiaddr.codecs.ip4",
)

#: How long the processes that a peer forked may outlive it [s].
GRACE = 1.0
#: Interval at which they are looked for [s].
POLL = 0.05


class Forkserver:
    """Accepts requests for peers on a unix socket and forks them.

    Args:
        path: Path of the socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._peers: dict[int, socket.socket] = {}
        self._leaving: dict[int, float] = {}
        self._selector = selectors.DefaultSelector()
        self._wakeup, wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup.setblocking(False)
        self._signals = wakeup  # kept open: the signal module holds only its descriptor
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._ending = False
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def _on_sigterm(self, *_: Any) -> None:
        self._ending = True

    def serve(self) -> None:
        """Serve until the standard input is closed."""
        for name in PRELOAD:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()
        self._server.bind(self._path)
        self._server.listen(64)
        for source in (self._server, self._wakeup, sys.stdin):
            self._selector.register(source, selectors.EVENT_READ)
        try:
            while not self._ending:
                for key, _ in self._selector.select(POLL if self._leaving else None):
                    if key.fileobj is self._server:
                        self._accept()
                    elif key.fileobj is self._wakeup:
                        self._wakeup.recv(4096)
                        self._reap()
                    elif not os.read(sys.stdin.fileno(), 4096):
                        self._ending = True
                self._kill_leftovers()
        finally:
            self._end()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError as error:  # no descriptor is left; the request stays in the queue
            print(f"cannot accept a request now: {error!r}", file=sys.stderr, flush=True)
            time.sleep(POLL)
            return
        self._fork(connection)

    def _fork(self, connection: socket.socket) -> None:
        connection.settimeout(5.0)
        try:
            with connection.makefile("r", encoding="utf-8") as lines:
                request = json.loads(lines.readline())
            connection.settimeout(None)
            pid = os.fork()
        except (OSError, ValueError) as error:  # the other peers live on
            print(f"refused a request: {error!r}", file=sys.stderr, flush=True)
            connection.close()
            return
        if pid == 0:
            self._become_peer(connection, request)
        self._peers[pid] = connection

    def _become_peer(self, connection: socket.socket, request: dict[str, Any]) -> None:
        from rayhive.peer.process import leave, run_peer
        from rayhive.spec.replicate import PeerSpec
        from rayhive.strategy.forked_locks import renew_locks

        code = 1
        try:
            os.setsid()
            renew_locks()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            self._selector.close()
            for other in (self._server, self._wakeup, self._signals, *self._peers.values()):
                other.close()
            with open(os.devnull) as null, open(request["log"], "a") as log:
                for source, target in ((null, 0), (log, 1), (log, 2)):
                    os.dup2(source.fileno(), target)
            os.environ.update(request.get("env") or {})
            tempfile.tempdir = None  # so that a TMPDIR among them counts
            code = run_peer(connection, PeerSpec.model_validate(request["spec"]))
        except BaseException as error:
            print(f"peer ended: {error!r}", file=sys.stderr)
        finally:
            leave(code)

    def _reap(self) -> None:
        while self._peers:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._leaving[pid] = time.monotonic() + GRACE
            connection = self._peers.pop(pid, None)
            if connection is not None:
                code = os.waitstatus_to_exitcode(status)
                line = json.dumps({"kind": "exited", "pid": pid, "exit_code": code})
                with contextlib.suppress(OSError):
                    connection.sendall(f"\n{line}\n".encode())
                connection.close()

    def _kill_leftovers(self) -> None:
        """Kill the remaining process groups of peers that ended a while ago.

        hivemind's forks die with the peer by themselves. Torch's memory manager gets the time to
        remove the shared memory of the dead processes.
        """
        for pid, deadline in list(self._leaving.items()):
            if not _signal_group(pid, 0) or time.monotonic() >= deadline:
                _signal_group(pid, signal.SIGKILL)
                del self._leaving[pid]

    def _end(self) -> None:
        deadline = time.monotonic() + GRACE
        while self._leaving and time.monotonic() < deadline:
            self._selector.select(0.01)
            self._kill_leftovers()
        for pid in (*self._peers, *self._leaving):
            _signal_group(pid, signal.SIGKILL)
        for pid in self._peers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        with contextlib.suppress(FileNotFoundError):
            Path(self._path).unlink()


def _signal_group(pid: int, number: int) -> bool:
    """Send a signal to a process group; return whether the group exists."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    Forkserver(sys.argv[1]).serve()
