"""Processes and files that a test session left behind; there should be none.

A process belongs to the session if it inherited the session's token, or if it is a fork of the
session's own process. That is exact even when several sessions share a machine. Files in shared
directories have no owner: files that no living process uses belong to the session if no other
session runs hivemind at the time, and cannot be attributed otherwise. The workers of pytest-xdist
inherit the token of their session, which looks for leaks when they have ended.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

TOKEN_VARIABLE = "RAYHIVE_TEST_SESSION"
SHARED_MEMORY = Path("/dev/shm")
SOCKETS = Path("/tmp")

#: Longest time in which the processes of a session end after its last test [s].
PATIENCE_S = 10.0

#: Helpers of the test process itself, which end when it ends.
_OWN_HELPERS = ("multiprocessing.resource_tracker", "torch_shm_manager")


def survivors(token: str) -> list[psutil.Process]:
    """Return the living processes of the session that has ``token``, without its own process."""
    here = psutil.Process()
    own_line = here.cmdline()
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid == here.pid or process.status() == psutil.STATUS_ZOMBIE:
                continue
            line = process.cmdline()
            if process.ppid() == here.pid and any(h in " ".join(line) for h in _OWN_HELPERS):
                continue
            # A fork of this process has the environment that this process was started with,
            # in which the token is missing. Other workers have the same parent.
            fork = (
                line == own_line
                and process.ppid() != here.ppid()
                and process.create_time() > here.create_time()
                and os.getsid(process.pid) == os.getsid(0)
            )
            if fork or process.environ().get(TOKEN_VARIABLE) == token:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue  # ended meanwhile, or another user's
    return found


def strangers(token: str) -> bool:
    """Return whether a process outside the session with ``token`` runs hivemind or tests."""
    for process in psutil.process_iter():
        try:
            theirs = process.environ().get(TOKEN_VARIABLE, token) != token
            daemon = process.name() == "p2pd"
            if theirs or (daemon and process.environ().get(TOKEN_VARIABLE) != token):
                return True
        except psutil.Error:
            continue
    return False


def _stale_shared_memory() -> set[Path]:
    stale = set()
    for path in SHARED_MEMORY.glob("*"):
        if not path.name.startswith(("torch_", "hivemind", "rayhive", "psm_", "sem.loky-")):
            continue
        owner = re.match(r"(?:torch_|sem\.loky-)(\d+)[_-]", path.name)
        if owner is None or not psutil.pid_exists(int(owner.group(1))):
            stale.add(path)
    return stale


def _stale_sockets() -> set[Path]:
    paths = [*SOCKETS.glob("hivemind-*.sock"), *SOCKETS.glob("rayhive-*.sock")]
    bound = set(Path("/proc/net/unix").read_text().split())  # read last: a new one is in it
    return {path for path in paths if str(path) not in bound}


def stale_files() -> set[Path]:
    """Return the shared memory and sockets of the stack that no living process uses."""
    return _stale_shared_memory() | _stale_sockets()


@dataclass(frozen=True)
class Watch:
    """Files that existed before a session, to find those that the session left behind."""

    token: str
    files: set[Path] = field(default_factory=stale_files)

    def processes(self, patience_s: float) -> list[str]:
        """Return one line per process that still runs after ``patience_s`` seconds.

        They are killed, so that one leak does not disturb later runs.
        """
        _, alive = psutil.wait_procs(survivors(self.token), timeout=patience_s)
        lines = []
        for process in alive:
            try:
                lines.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
                process.kill()
            except psutil.Error:
                continue
        return lines

    def new_files(self, patience_s: float) -> list[str]:
        """Return one line per new file that no living process uses after ``patience_s`` seconds."""
        end = time.monotonic() + patience_s
        while (left := stale_files() - self.files) and time.monotonic() < end:
            time.sleep(0.1)  # a dying process unlinks its files a moment after it is gone
        return [f"file {path}" for path in sorted(left)]


class LeakCheck:
    """Plugin of pytest that fails a session if a process or a file of its own outlives it.

    Args:
        watch: The session's, made before its first test.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch, self._company = watch, strangers(watch.token)
        self._leaks: list[str] = []
        self._unclear: list[str] = []

    @pytest.hookimpl(trylast=True)  # after pytest-xdist has ended the workers
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Look for leaks, and end the processes that are found."""
        self._leaks = self._watch.processes(PATIENCE_S)
        files = self._watch.new_files(patience_s=2.0)
        if files and (self._company or strangers(self._watch.token)):
            self._unclear = files
        else:
            self._leaks += files
        if self._leaks and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name the leaks."""
        for title, lines in (
            ("left behind by this test session", self._leaks),
            ("left behind, perhaps by another session", self._unclear),
        ):
            if lines:
                terminalreporter.section(title, red=lines is self._leaks)
                for line in lines:
                    terminalreporter.line(line)
