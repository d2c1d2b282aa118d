"""Runs functions in new processes with torch and Lightning imported: swarms in seconds.

A server that has imported the slow packages forks one child for each call. hivemind is imported by
the children, because its locks must not be shared. A child runs one function of one test file, and
writes the result, plain data, to a file.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = ("torch", "lightning.pytorch", "numpy")


@dataclass
class Child:
    """A running call."""

    server: Server
    pid: int
    folder: Path

    def result(self, timeout: float = 60.0) -> Any:
        """Return the result of the function.

        Raises:
            AssertionError: It failed or took too long; the message has the end of its output.
        """
        code = self.exit_code(timeout)
        file = self.folder / "result.json"
        assert code == 0 and file.exists(), f"exit code {code}\n{self.end_of_log()}"
        return json.loads(file.read_text())

    def exit_code(self, timeout: float = 60.0) -> int | None:
        """Return its exit code; None if it had to be killed after ``timeout``."""
        answer = self.server.ask(do="wait", pid=self.pid, timeout=timeout)
        code = answer["code"]
        return None if code is None else int(code)

    def log(self) -> str:
        """Return its output so far."""
        return (self.folder / "log").read_text(errors="replace")

    def end_of_log(self) -> str:
        """Return the end of its output, which has the error."""
        return self.log()[-4000:]

    def wait_for_line(self, start: str, timeout: float = 60.0) -> str:
        """Return the first line of its output that begins with ``start``."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for line in self.log().splitlines(keepends=True):
                if line.startswith(start) and line.endswith("\n"):
                    return line.rstrip("\n")
            assert self.is_alive(), f"it ended\n{self.end_of_log()}"
            time.sleep(0.02)
        raise AssertionError(f"no line {start!r}\n{self.end_of_log()}")

    def invitation(self) -> dict[str, str]:
        """Wait for the line in which a first peer prints its addresses; return the variable."""
        variable, _, addresses = (
            self.wait_for_line("INITIAL_PEERS=").partition(" ")[0].partition("=")
        )
        return {variable: addresses}

    def is_alive(self) -> bool:
        """Return whether it still runs."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def signal(self, number: int, group: bool = False) -> None:
        """Send a signal to it, or to its whole process group as a terminal does."""
        (os.killpg if group else os.kill)(self.pid, number)


class Server:
    """The process that forks a child for each call."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rayhive-swarm-")
        self._calls = 0
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.swarm_helpers"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the server has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def call(
        self, function: Callable[..., Any], env: dict[str, str] | None = None, **arguments: Any
    ) -> Child:
        """Begin to run ``function(**arguments)`` in a process of its own."""
        self._calls += 1
        folder = Path(self._folder.name) / str(self._calls)
        folder.mkdir()
        (folder / "log").touch()
        answer = self.ask(
            do="fork",
            module=function.__module__,
            function=function.__qualname__,
            arguments=arguments,
            env=env or {},
            folder=str(folder),
        )
        return Child(self, int(answer["pid"]), folder)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.communicate(timeout=10)
        self._folder.cleanup()


@functools.cache
def server() -> Server:
    """Return the server of this test session."""
    return Server()


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """Let a module use :func:`call`; the server ends with the session."""
    yield
    server().close()


def call(
    function: Callable[..., Any], env: dict[str, str] | None = None, **arguments: Any
) -> Child:
    """Begin to run a function of a test module in a process of its own."""
    return server().call(function, env, **arguments)


# -- in the server ---------------------------------------------------------------------------------


def _serve() -> None:
    import importlib

    for name in PRELOAD:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    living: set[int] = set()
    for line in requests:
        request = json.loads(line)
        if request["do"] == "fork":
            pid = os.fork()
            if pid == 0:
                _become(request)
            living.add(pid)
            answer: dict[str, Any] = {"pid": pid}
        else:
            answer = {"code": _wait(request["pid"], request["timeout"])}
            living.discard(request["pid"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    for pid in living:
        _wait(pid, 0.0)


def _wait(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            for child in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
                child.kill()
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)


def _become(request: dict[str, Any]) -> None:
    import importlib

    code = 1
    folder = Path(request["folder"])
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        sys.stdin = open(0)  # noqa: SIM115 - for the rest of this process
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(request["env"])
        os.chdir(folder)
        target_function: Any = importlib.import_module(request["module"])
        for part in request["function"].split("."):
            target_function = getattr(target_function, part)
        result = target_function(**request["arguments"])
        (folder / "part.json").write_text(json.dumps(result))
        (folder / "part.json").rename(folder / "result.json")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
