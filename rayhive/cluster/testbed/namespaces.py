"""Network namespaces: calls inside one, and the processes that run in it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from pyroute2 import netns

#: Folder of the named namespaces.
FOLDER = Path("/run/netns")
_PATIENCE = 10.0

T = TypeVar("T")


def inside(namespace: str | None, do: Callable[[], T]) -> T:
    """Call a function in a network namespace, and return its result.

    The call runs in a new thread: only that thread changes the namespace, and netlink sockets find
    no event loop there. Processes that it starts, and sockets that it creates, stay in the
    namespace.

    Args:
        namespace: Name of the namespace; None for that of this process.
        do: The function.
    """
    answer: Future[T] = Future()

    def body() -> None:
        try:
            if namespace is not None:
                with (FOLDER / namespace).open("rb") as file:
                    netns.setns(file.fileno(), flags=0)
            answer.set_result(do())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=body, name=f"inside {namespace}", daemon=True)
    thread.start()
    thread.join()
    return answer.result()


def exists(namespace: str) -> bool:
    """Return whether there is a namespace of this name."""
    return (FOLDER / namespace).exists()


def named(prefix: str) -> list[str]:
    """Return the namespaces whose names begin with ``prefix``."""
    if not FOLDER.is_dir():
        return []
    return sorted(path.name for path in FOLDER.iterdir() if path.name.startswith(prefix))


def processes(namespaces: Iterable[str]) -> list[int]:
    """Return the pids of the processes in any of these namespaces, without zombies."""
    wanted = set()
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            wanted.add(_identity(FOLDER / namespace))
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if _identity(Path(f"/proc/{name}/ns/net")) in wanted:
                    found.append(int(name))
    return found


def kill(find: Callable[[], Iterable[int]]) -> list[int]:
    """Kill processes until none is found; return the pids that were killed.

    Args:
        find: Returns the pids to kill; this process is left out.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _PATIENCE
    while living := set(find()) - {os.getpid()}:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= living
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)  # the end of a process that is not a child is not signalled
    return sorted(killed)


def remove(namespace: str) -> None:
    """Remove a namespace with its interfaces, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        netns.remove(namespace)


def create(namespace: str) -> None:
    """Create a namespace without IPv6."""
    netns.create(namespace)
    inside(namespace, _no_ipv6)


def _no_ipv6() -> None:
    """Disable IPv6, whose background traffic would be counted on the links."""
    for scope in ("all", "default"):
        with contextlib.suppress(OSError):
            Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6").write_text("1")


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
