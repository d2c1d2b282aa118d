"""Network namespaces: calls inside one, its netlink sockets, and the processes that run in it.

pyroute2 creates its event loops by the policy of the process. In Ray's workers that is uvloop's,
which does not support netlink. So each netlink socket gets a separate standard loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pyroute2 import IPRoute, netns
from pyroute2.nftables.main import AsyncNFTables, NFTables

from rayhive.cluster.node.processes import pids, wait_until

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

    def body() -> T:
        if namespace is not None:
            with (FOLDER / namespace).open("rb") as file:
                netns.setns(file.fileno(), flags=0)
        return do()

    with ThreadPoolExecutor(1, thread_name_prefix=f"inside {namespace}") as thread:
        return thread.submit(body).result()


@contextmanager
def routes() -> Iterator[IPRoute]:
    """Open the interfaces, addresses and queueing disciplines of the current namespace."""
    with _own_loop() as loop, IPRoute(use_event_loop=loop) as ip:
        yield ip


@contextmanager
def tables(family: int) -> Iterator[NFTables]:
    """Open the packet filter's tables of one family in the current namespace."""
    with _own_loop() as loop, _Tables(family, loop) as opened:
        yield opened


@contextmanager
def _own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.SelectorEventLoop()
    try:
        yield loop
    finally:
        loop.run_until_complete(asyncio.sleep(0))  # runs the remaining callbacks of the socket
        loop.close()


class _Tables(NFTables):  # type: ignore[misc]
    """Packet filter's tables on a given loop."""

    def __init__(self, family: int, loop: asyncio.AbstractEventLoop) -> None:
        self.asyncore = AsyncNFTables(nfgen_family=family)
        self.asyncore.use_event_loop = loop
        self.asyncore.local.keep_event_loop = True
        self.asyncore.event_loop.run_until_complete(self.asyncore.setup_endpoint())


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
    for pid in pids():
        with contextlib.suppress(OSError):
            if _identity(Path(f"/proc/{pid}/ns/net")) in wanted:
                found.append(pid)
    return found


def kill(find: Callable[[], Iterable[int]]) -> list[int]:
    """Kill processes until none is found; return the pids that were killed.

    Args:
        find: Returns the pids to kill; this process is left out.
    """
    killed: set[int] = set()

    def gone() -> bool:
        living = set(find()) - {os.getpid()}
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(living)
        return not living

    wait_until(gone, _PATIENCE)
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
