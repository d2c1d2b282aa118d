"""A local Ray cluster that lives exactly as long as its driver."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from rayhive.cluster import actors
from rayhive.cluster.live_metrics import PORT
from rayhive.cluster.node import machine, process_group
from rayhive.cluster.node.processes import ending, import_paths, start_reaper
from rayhive.cluster.testbed.entrypoint import refuse_dashboard
from rayhive.errors import ClusterError, ConfigError, Problem

OBJECT_STORE = 80 * 2**20  # Ray's minimum; rayhive stores no large objects
_REAPER_TIMEOUT = 12.0
#: Variables of Ray with which a user chooses the token of a cluster.
AUTHENTICATION = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
#: Token of all clusters that this process starts, as Ray reads the token only once.
_TOKEN = secrets.token_hex(32)


class EmbeddedRay:
    """A local Ray with a private directory.

    The kernel kills Ray's daemons when the driver dies, even by SIGKILL. A reaper process then
    removes the directory and the remains of the peers. The object has to be created in the main
    thread, because the kernel watches the thread that started the daemons.

    Attributes:
        directory: The private directory.
        agents: Directory for node agents.
    """

    def __init__(self) -> None:
        port = metrics_port()
        base = Path(machine.short_temporary_directory())
        process_group.clear_orphaned(base)
        self.directory = Path(tempfile.mkdtemp(prefix=process_group.DIRECTORY_PREFIX, dir=base))
        self.agents = self.directory / "a"
        process_group.claim(self.directory, os.getpid())
        self._reaper = start_reaper(process_group.__name__, self.directory)
        try:
            if port is None:  # Ray's agents, which take long to start, only serve metrics here
                refuse_dashboard()
            with environment(daemon_variables()), kept_signal_handlers():
                ray.init(
                    num_cpus=machine.cores(),
                    namespace=actors.NAMESPACE,
                    include_dashboard=False,
                    _metrics_export_port=port,
                    object_store_memory=OBJECT_STORE,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(self.directory),
                )
                keep_silent()
                self._daemons = _daemons()
        except Exception as error:
            self.close()
            raise ClusterError(f"an embedded Ray did not start: {error}") from error

    def broken(self) -> str | None:
        """Return a description of a daemon of Ray that has ended; None if all of them run."""
        for name, process in self._daemons.items():
            code = process.poll()
            if code is not None:
                return f"the {name} of the embedded Ray (pid {process.pid}) {ending(code)}"
        return None

    def close(self) -> None:
        """End Ray and remove everything that belongs to it. May be called again."""
        if self._reaper.stdin is None or self._reaper.stdin.closed:
            return
        with contextlib.suppress(Exception):
            ray.shutdown()
        self._reaper.stdin.close()
        try:
            self._reaper.wait(_REAPER_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._reaper.kill()
            self._reaper.wait()
            process_group.clear(self.directory, patience=0.0)


def metrics_port() -> int | None:
    """Return the port at which an embedded Ray is to serve its metrics; None for no metrics.

    Raises:
        ConfigError: The variable is no number of a port.
    """
    text = os.environ.get(PORT)
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise ConfigError(Problem(PORT, text, "the number of a port, 1 to 65535"))
    return int(text)


def _daemons() -> dict[str, subprocess.Popen[bytes]]:
    """Return the essential daemons of the Ray that this process started, by name."""
    # Ray has no public interface for them.
    node = getattr(importlib.import_module("ray._private.worker"), "_global_node", None)
    found = getattr(node, "all_processes", {})
    names = {"raylet": "raylet", "gcs_server": "GCS server"}
    return {names[kind]: found[kind][0].process for kind in names if found.get(kind)}


def daemon_variables() -> dict[str, str]:
    """Return the environment of Ray's daemons, and thereby of all workers."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "1",
        "PYTHONPATH": os.pathsep.join(import_paths()),
    }
    if not any(name in os.environ for name in AUTHENTICATION):
        # Ray requires a token by default. It would write its own to the user's home, and
        # clusters that are started later would then require it too.
        variables["RAY_AUTH_TOKEN"] = _TOKEN
    return variables


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment in the block; restore all changed ones at its end."""
    before = {name: os.environ.get(name) for name in (*variables, "RAY_AUTH_MODE", "RAY_ADDRESS")}
    os.environ.update(variables)
    os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def keep_silent() -> None:
    """Keep Ray from printing the log of a dying node to this process's standard output.

    Ray's option ``log_to_driver`` does not cover these logs. The events hold each death and its
    reason.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


@contextlib.contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers of the caller after ``ray.init``.

    If SIGTERM had no handler, Ray's stays: it raises SystemExit, so that ``with`` blocks and
    ``finally`` clauses run. Below it, Ray installs a handler in C that aborts the process three
    seconds later, and closing a cluster may take longer. Setting the Python handler again replaces
    the one in C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            kept = signal.getsignal(number) if handler in (None, signal.SIG_DFL) else handler
            if kept is not None:
                signal.signal(number, kept)
