"""Child processes of hivemind: they ignore Ctrl-C and do not outlive the trainer.

Without this, an interrupt from the terminal ends the network daemon before the trainer, the trainer
ignores interrupts, and the averagers of a killed trainer go on joining groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import hivemind
import psutil
import torch
from hivemind.p2p import P2P

from rayhive.averaging.tensor_memory import drop_inherited

_PR_SET_PDEATHSIG = 1
#: The path of a socket may have 107 bytes, of which the file name takes up to 50.
_LONGEST_FOLDER = 55
_LIBC = ctypes.CDLL(None, use_errno=True)
#: Options of the fork that is under way; None outside of :meth:`ChildProcesses.forking`.
_fork: dict[str, Any] | None = None


def _in_child() -> None:
    if _fork is not None:
        if _fork["die_with_parent"]:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if _fork["own_group"]:
            os.setpgid(0, 0)
        drop_inherited(_fork["unread"])


os.register_at_fork(after_in_child=_in_child)


class ChildProcesses:
    """The processes that hivemind starts for one strategy, and their clean-up."""

    def __init__(self) -> None:
        folder = tempfile.gettempdir()
        if len(folder) > _LONGEST_FOLDER:
            folder = "/tmp"
        self._prefix = f"{folder}/hivemind-{os.getpid()}-{secrets.token_hex(4)}-"

    @contextlib.contextmanager
    def forking(
        self, own_group: bool = False, unread: Sequence[torch.Tensor] = ()
    ) -> Iterator[None]:
        """Make processes that are forked in the body ignore SIGINT and die with this process.

        The trainer's own handler of SIGINT, which hivemind replaces, is restored afterwards. If
        the body fails, the processes that it has forked are killed.

        Args:
            own_group: Give the fork a process group of its own. The network daemon handles
                SIGINT even where it inherits that it is ignored, so it must not be in the
                terminal's foreground group.
            unread: Tensors that the fork never reads; it gives back their memory.
        """
        global _fork
        main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT) if main else None
        socket_prefix = P2P._UNIX_SOCKET_PREFIX
        if main:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        # the kernel sends its signal when the forking *thread* ends, so only the main one asks
        _fork = {"die_with_parent": main, "own_group": own_group, "unread": unread}
        P2P._UNIX_SOCKET_PREFIX = f"/unix{self._prefix}"
        before = set(descendants(os.getpid()))
        try:
            yield
        except BaseException:
            kill([child for child in descendants(os.getpid()) if child not in before])
            self.remove_sockets()
            raise
        finally:
            P2P._UNIX_SOCKET_PREFIX = socket_prefix
            _fork = None
            if main:
                signal.signal(signal.SIGINT, handler)

    def start_dht(self, **arguments: Any) -> hivemind.DHT:
        """Start a :class:`hivemind.DHT`; on failure its processes are killed."""
        # a module that exists already would stay there, as it was before its training
        known = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Parameter)]
        with self.forking(own_group=True, unread=known):
            return hivemind.DHT(start=True, **arguments)

    def end_dht(self, dht: hivemind.DHT) -> None:
        """Shut the DHT down, and kill it if it does not answer."""
        daemons = descendants(dht.pid)
        with contextlib.suppress(Exception):
            dht.shutdown()
        end_process(dht)
        kill(daemons)
        self.remove_sockets()

    def remove_sockets(self) -> None:
        """Remove the socket files of processes that were killed."""
        for path in glob.glob(f"{glob.escape(self._prefix)}*"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def descendants(pid: Any) -> list[psutil.Process]:
    """Return the children of a process, recursively; none if it has ended."""
    if not isinstance(pid, int):  # it has not been started
        return []
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """Kill processes and wait until they are gone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=1.0)


def end_process(process: Any, grace_s: float = 1.0) -> None:
    """Wait for the end of a hivemind process, and kill it if it goes on."""
    with contextlib.suppress(Exception):
        process.join(grace_s)
        if process.is_alive():
            process.kill()
            process.join(grace_s)
