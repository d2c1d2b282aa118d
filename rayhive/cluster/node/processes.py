"""Processes of this machine: identity and groups, waits, and reapers.

A *reaper* is a process that waits for the end of its owner, also by SIGKILL, and then removes what
the owner left. A reaper has to start fast, so this module needs the standard library alone.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def pids() -> Iterator[int]:
    """Yield the pids of the processes of this machine."""
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the third on (the state; see proc(5)).

    A zombie counts as gone: the result is None for it, as for a pid without a process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else fields


def started(pid: int) -> int | None:
    """Return the start time of a process [clock ticks since boot]; None if no such process runs.

    Pid and start time together identify a process, as the kernel reuses pids.
    """
    fields = stat(pid)
    return None if fields is None else int(fields[19])


def marked(name: str, maker: int | None = None) -> str:
    """Return a name for a kernel object, or for a part of a file, that tells its maker.

    Args:
        name: The name, unique among those of the maker.
        maker: Pid of the maker; this process by default.
    """
    pid = os.getpid() if maker is None else maker
    return f"{pid}.{started(pid)}-{name}"


def is_of_another(name: str) -> bool:
    """Return whether the maker in a name of :func:`marked` is another process, which still runs."""
    found = re.match(r"(\d+)\.(\d+)-", name)
    if found is None:
        return False
    pid, start = int(found[1]), int(found[2])
    return pid != os.getpid() and started(pid) == start


def group_of(leader: int) -> list[int]:
    """Return the processes in the session or the process group of ``leader``."""
    found = ((pid, stat(pid)) for pid in pids())
    return [pid for pid, fields in found if fields and str(leader) in (fields[2], fields[3])]


def ending(code: int | None) -> str:
    """Return how a process ended, in words; ``code`` is negative for a signal, None if unknown."""
    if code is None:
        return "ended"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def wait_until(condition: Callable[[], object], patience: float, every: float = 0.02) -> bool:
    """Return whether a condition comes true in time; no signal announces it.

    The end of a process that is not a child of this one is such a condition.

    Args:
        condition: The condition, which is checked at least once.
        patience: Longest wait [s].
        every: Time between two checks [s].
    """
    deadline = time.monotonic() + patience
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(every)
    return True


def import_paths() -> list[str]:
    """Return the paths with which another process can import all that this one can import."""
    package_root = str(Path(__file__).resolve().parents[3])
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


def start_reaper(module: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Start a reaper for this process; closing its standard input ends its wait.

    Args:
        module: Module to run; it calls :func:`await_owner` first.
        arguments: Its command-line arguments.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(import_paths())},
        cwd="/",
        start_new_session=True,
    )


def await_owner() -> None:
    """Wait for the end of the owner, which holds the other end of standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
