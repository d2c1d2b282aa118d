"""Processes of one peer, and a thread that ends waits for answers that cannot come.

hivemind's futures are answered by other processes. When such a process dies, its futures are never
answered, and a wait for one of them never ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Mapping

import hivemind
import psutil
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import StepControl
from hivemind.utils import MPFuture, get_logger

from rayhive.errors import PeerError
from rayhive.optim.child_processes import descendants

logger = get_logger(__name__)

#: Interval between checks of processes without a pidfd, and between failing futures again [s].
CHECK_S = 0.2
#: Longest wait for the end of a process that was killed [s].
JOIN_S = 1.0
#: Names of the processes in error texts, by role.
SPOKEN = {
    "dht": "DHT",
    "gradient_averager": "gradient averager's process",
    "state_averager": "state averager's process",
}


class PeerProcessDied(PeerError):
    """A process died that this peer cannot do without."""


class WaitInterrupted(PeerError):
    """A wait for another process was interrupted."""


class ProcessWatchdog:
    """Watches processes; when one dies, all futures that this process waits for fail.

    Args:
        processes: Name of each process and its pid.
        on_death: Called once with the error, in the watchdog's thread.

    Attributes:
        error: The death of a process; None as long as all are alive.
    """

    def __init__(
        self, processes: Mapping[str, int], on_death: Callable[[PeerProcessDied], None]
    ) -> None:
        self.error: PeerProcessDied | None = None
        self._processes, self._on_death = dict(processes), on_death
        self._wake_read, self._wake_write = os.pipe()
        self._ended = threading.Event()
        self._interrupted = False
        self._thread = threading.Thread(target=self._watch, name="ProcessWatchdog", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if a process has died, or if the waits of this process are interrupted.

        Raises:
            PeerProcessDied: A process has died.
            WaitInterrupted: :meth:`interrupt` was called.
        """
        if self.error is not None:
            raise self.error
        if self._interrupted:
            raise WaitInterrupted("interrupted while waiting for another process")

    def interrupt(self) -> None:
        """Fail all futures, present and later ones, until :meth:`resume`.

        It takes no lock, so a signal handler may call it.
        """
        self._interrupted = True
        if not self._ended.is_set():
            os.write(self._wake_write, b"i")

    def resume(self) -> None:
        """End the effect of :meth:`interrupt`."""
        self._interrupted = False

    def expect_ends(self) -> None:
        """Accept ends of processes from now on. After an earlier death, futures still fail."""
        self._processes = {}

    def close(self) -> None:
        """Stop watching; calling it again does nothing."""
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
                with contextlib.suppress(OSError, AttributeError):  # kernels before 5.3
                    handle = os.pidfd_open(pid)
                    stack.callback(os.close, handle)
                    handles[handle] = name
            poll = select.poll()  # select() fails above descriptor 1023; shared tensors have many
            for descriptor in (self._wake_read, *handles):
                poll.register(descriptor, select.POLLIN)
            while self.error is None and not self._ended.is_set():
                sleeps = len(handles) == len(self._processes) and not self._interrupted
                events = poll.poll(None if sleeps else 1e3 * CHECK_S)
                ready = [descriptor for descriptor, _ in events]
                if self._ended.is_set():
                    return
                if self._wake_read in ready:
                    os.read(self._wake_read, 64)
                if self._interrupted:
                    _interrupt_futures()
                self._find_dead([handles[handle] for handle in ready if handle in handles])
        while not self._ended.wait(CHECK_S):
            _fail_futures(self.error)

    def _find_dead(self, reported: list[str]) -> None:
        dead = reported or [name for name, pid in self._processes.items() if not _alive(pid)]
        if not dead or not self._processes or self._ended.is_set():
            if reported:  # an expected end: its pidfd stays ready
                self._ended.wait(CHECK_S)
            return
        names = " and ".join(f"{name} (pid {self._processes[name]})" for name in dead)
        self.error = PeerProcessDied(f"{names} died; this peer cannot go on without it")
        logger.error(str(self.error))
        self._on_death(self.error)
        _fail_futures(self.error)


class PeerProcesses:
    """The processes that a peer cannot do without.

    Args:
        dht: The peer's DHT.
        averagers: Role -> running averager; None for one that the peer does not have.
    """

    def __init__(self, dht: hivemind.DHT, **averagers: DecentralizedAverager | None) -> None:
        self._dht = dht
        self._averagers = {role: made for role, made in averagers.items() if made is not None}

    @property
    def pids(self) -> dict[str, int]:
        """Role -> pid."""
        return {
            "trainer": os.getpid(),
            "dht": self._dht.pid,
            **{child.name(): child.pid for child in descendants(self._dht.pid)},
            **{role: averager.pid for role, averager in self._averagers.items()},
        }

    def watch(self, on_death: Callable[[PeerProcessDied], None]) -> ProcessWatchdog:
        """Return a watchdog of all processes but the trainer."""
        watched = {role: pid for role, pid in self.pids.items() if role != "trainer"}
        named = {SPOKEN.get(role, role): pid for role, pid in watched.items()}
        return ProcessWatchdog(named, on_death)

    def kill_averagers(self) -> None:
        """Kill the averagers, and release the tensors' locks that they may have held."""
        for averager in self._averagers.values():
            averager.kill()
            averager.join(JOIN_S)
            with contextlib.suppress(ValueError):  # it was not held
                averager.lock_averaged_tensors.release()


def _alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _pending_futures() -> list[MPFuture]:
    """Return the unanswered hivemind futures of this process."""
    futures = [reference() for reference in list((MPFuture._active_futures or {}).values())]
    return [future for future in futures if future is not None and not future.done()]


def _fail_futures(error: BaseException | None) -> None:
    for future in _pending_futures():
        with contextlib.suppress(Exception):  # it was answered meanwhile
            future.set_exception(error)


def _interrupt_futures() -> None:
    """Fail all futures; averagers also learn that their steps are cancelled."""
    for future in _pending_futures():
        if isinstance(future, StepControl):
            with contextlib.suppress(Exception):  # not attached to a step yet, or answered
                future.cancel()
    _fail_futures(WaitInterrupted("interrupted while waiting for another process"))
