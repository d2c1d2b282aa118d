"""A Ray of our own on this machine, for as long as the driver lives and no longer."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray

from rayhive.cluster.node import machine, process_group
from rayhive.errors import ClusterError
from rayhive.spec.replicate import ReplicateSpec

_OBJECT_STORE = 80 * 2**20  # the least that Ray takes; nothing large goes through it
#: In the private directory: one line for each replicate that was started.
RUNS_FILE = "runs.jsonl"
_BURIAL_TIMEOUT = 12.0
#: One token for all embedded clusters of this process: Ray reads it once and keeps it.
_TOKEN = secrets.token_hex(32)


class EmbeddedRay:
    """A local Ray with a private directory.

    The kernel kills Ray's daemons when the driver dies, and an undertaker beside it clears up
    the directory and whatever the peers left, also after a SIGKILL of the driver. It has to be
    started from the main thread: the kernel watches the thread that started the daemons.

    Args:
        namespace: Of the driver.
        num_cpus: Logical CPUs; those of the machine if None.
    """

    def __init__(self, namespace: str, num_cpus: int | None = None) -> None:
        base = Path(machine.short_temporary_directory())
        for orphan in process_group.orphaned(base):
            process_group.clear(orphan, patience=0.0)
        self.directory = Path(tempfile.mkdtemp(prefix=process_group.DIRECTORY_PREFIX, dir=base))
        process_group.claim(self.directory, os.getpid())
        self._undertaker = subprocess.Popen(
            [sys.executable, process_group.__file__, str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            with _environment(_variables()), kept_signal_handlers(), _minimal_daemons():
                ray.init(
                    num_cpus=num_cpus or len(os.sched_getaffinity(0)),
                    namespace=namespace,
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(self.directory),
                )
                keep_silent()
                self._daemons = _daemons()
        except Exception as error:
            self.close()
            raise ClusterError(f"an embedded Ray did not start: {error}") from error

    @property
    def agents(self) -> Path:
        """The directory for node agents."""
        return self.directory / "a"

    def broken(self) -> str | None:
        """Return which of Ray's daemons has ended, and how; None if all of them run."""
        for name, process in self._daemons.items():
            code = process.poll()
            if code is not None:
                how = (
                    f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                )
                return f"the {name} of the embedded Ray (pid {process.pid}) {how}"
        return None

    def note_run(self, spec: ReplicateSpec) -> None:
        """Write down that a replicate runs here, for other processes on this machine."""
        run = {"run_id": spec.run_id, "study": spec.study, "folder": spec.folder}
        with (self.directory / RUNS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")

    def close(self) -> None:
        """End Ray and remove all traces of it; may be called again."""
        if self._undertaker.stdin is None or self._undertaker.stdin.closed:
            return
        with contextlib.suppress(Exception):
            ray.shutdown()
        self._undertaker.stdin.close()
        try:
            self._undertaker.wait(_BURIAL_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._undertaker.kill()
            self._undertaker.wait()
            process_group.clear(self.directory, patience=0.0)


def _daemons() -> dict[str, subprocess.Popen[bytes]]:
    """Return the daemons of the Ray that this process started, without which it is of no use."""
    # There is no public way to them.
    node = getattr(importlib.import_module("ray._private.worker"), "_global_node", None)
    found = getattr(node, "all_processes", {})
    names = {"raylet": "raylet", "gcs_server": "GCS server"}
    return {names[kind]: found[kind][0].process for kind in names if found.get(kind)}


def _variables() -> dict[str, str]:
    """Return the environment of Ray's daemons, and thereby of all workers."""
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "1",
        "PYTHONPATH": os.pathsep.join(import_paths()),
    }
    given = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE")
    if not any(name in os.environ for name in given):
        # Ray asks for a token by default. Its own would be written to the user's home, and
        # clusters started later would then ask for it too.
        variables["RAY_AUTH_TOKEN"] = _TOKEN
    return variables


def import_paths() -> list[str]:
    """Return what workers need on their path to import what this process can import."""
    package_root = str(Path(__file__).resolve().parent.parent.parent)
    paths = [package_root, *(os.path.abspath(path or ".") for path in sys.path)]
    installed = {os.path.abspath(path) for path in sys.path if "-packages" in path}
    library = os.path.dirname(os.__file__)
    return list(
        dict.fromkeys(
            path
            for path in paths
            if os.path.isdir(path) and path not in installed and not path.startswith(library)
        )
    )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the duration; keep Ray's own mode of authentication out of the rest."""
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


@contextlib.contextmanager
def _minimal_daemons() -> Iterator[None]:
    """Let Ray's daemons start as they do where Ray is installed without its dashboard.

    Nothing of the dashboard is used here, yet ``include_dashboard=False`` still imports most of
    it in three processes, one after the other: on two cores 4.1 s instead of 7.5 s to start.
    There is no public switch; where the private one is missing, the start is slow again.
    """
    utils = importlib.import_module("ray._private.utils")
    name = "get_dashboard_dependency_error"
    original = getattr(utils, name, None)
    if original is None:
        yield
        return
    setattr(utils, name, lambda: ImportError("rayhive needs no dashboard"))
    try:
        yield
    finally:
        setattr(utils, name, original)


def keep_silent() -> None:
    """Keep Ray from printing the log of a node that dies into this process's standard output.

    Its option ``log_to_driver`` is not about that. What died, and why, is in the events.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


@contextlib.contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Undo what ``ray.init`` does to handlers that the caller had installed.

    Where SIGTERM had no handler Ray's stays: it raises SystemExit, so that ``with`` blocks and
    ``finally`` clauses run. But underneath, Ray has put a handler in C that aborts the process
    three seconds later, and closing a cluster may take longer: setting ours again replaces that.
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
