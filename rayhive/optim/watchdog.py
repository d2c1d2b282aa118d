"""Notices that a process died which a peer cannot do without, and lets nobody wait for it.

hivemind's futures are answered by other processes. When one of these dies, nothing ever comes,
and who waits for it, waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Mapping

import psutil
from hivemind.utils import MPFuture, get_logger

from rayhive.errors import PeerError

logger = get_logger(__name__)

#: Between two looks, where the kernel does not tell, and between two rounds of failing futures [s].
LOOK_S = 0.2


class PeerProcessDied(PeerError):
    """A process died that this peer cannot do without."""


class ProcessWatchdog:
    """Watches processes; when one dies, every future that this process waits for fails.

    Args:
        processes: Name of each process and its pid.
        on_death: Called once, in the watching thread, with the error.

    Attributes:
        error: What happened; None as long as all are alive.
    """

    def __init__(
        self, processes: Mapping[str, int], on_death: Callable[[PeerProcessDied], None]
    ) -> None:
        self.error: PeerProcessDied | None = None
        self._processes, self._on_death = dict(processes), on_death
        self._wake_read, self._wake_write = os.pipe()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ProcessWatchdog", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if a process has died.

        Raises:
            PeerProcessDied: Which one.
        """
        if self.error is not None:
            raise self.error

    def expect_ends(self) -> None:
        """From now on processes may end; futures are still failed if one had died before."""
        self._processes = {}

    def close(self) -> None:
        """Watch no longer; calling it again does nothing."""
        if not self._ended.is_set():
            self._ended.set()
            os.write(self._wake_write, b"x")
            self._thread.join()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _watch(self) -> None:
        with contextlib.ExitStack() as stack:
            handles = {}
            for name, pid in self._processes.items():
                with contextlib.suppress(OSError, AttributeError):  # not everywhere
                    handle = os.pidfd_open(pid)
                    stack.callback(os.close, handle)
                    handles[handle] = name
            poll = select.poll()  # select takes no descriptor above 1023; tensors have theirs, too
            for descriptor in (self._wake_read, *handles):
                poll.register(descriptor, select.POLLIN)
            while self.error is None and not self._ended.is_set():
                timeout = None if len(handles) == len(self._processes) else 1e3 * LOOK_S
                ready = [descriptor for descriptor, _ in poll.poll(timeout)]
                if self._ended.is_set():
                    return
                self._find_dead([handles[handle] for handle in ready if handle in handles])
        while not self._ended.wait(LOOK_S):
            _fail_all(self.error)

    def _find_dead(self, told: list[str]) -> None:
        dead = told or [name for name, pid in self._processes.items() if not _alive(pid)]
        if not dead or not self._processes or self._ended.is_set():
            self._ended.wait(LOOK_S)
            return
        names = " and ".join(f"{name} (pid {self._processes[name]})" for name in dead)
        self.error = PeerProcessDied(f"{names} died; this peer cannot go on without it")
        logger.error(str(self.error))
        self._on_death(self.error)
        _fail_all(self.error)


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _fail_all(error: PeerProcessDied | None) -> None:
    """Fail every future of hivemind's that this process waits for."""
    for reference in list((MPFuture._active_futures or {}).values()):
        future = reference()
        if future is not None and not future.done():
            with contextlib.suppress(Exception):  # it was answered meanwhile
                future.set_exception(error)
