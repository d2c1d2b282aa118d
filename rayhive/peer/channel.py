"""Channel between a peer process and its actor: JSON lines over a socket."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from rayhive.errors import described
from rayhive.events import Event, Left, Notice, PeerFailed, PeerFinished, dump_event
from rayhive.spec import commands
from rayhive.spec.model import Model

C = TypeVar("C", bound=Model)


class GivenNotice(Exception):
    """The peer got a preemption notice before it had begun to train."""


class Channel:
    """The peer's end of the channel.

    A thread reads commands, so that they arrive while the main thread trains. When the connection
    closes, the actor is dead, and the peer's process group is killed at once.

    Args:
        connection: The socket.
        peer: The peer's name in its events.

    Attributes:
        stop_reason: Reason to stop training; None as long as there is none.
        notice: Deadline of a preemption [s of ``time.monotonic``], infinite if the peer leaves
            after its present round; None without a notice.
        has_left: Whether the peer has reported that it left.
        has_failed: Whether the peer has reported an error.
        checkpoint_asked: Whether a checkpoint is to be written now.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self.stop_reason: str | None = None
        self.notice: float | None = None
        self.has_left = self.has_failed = self.checkpoint_asked = False
        self._connection = connection
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[commands.Command] = queue.SimpleQueue()
        self._listener: Callable[[commands.Command], None] = lambda _: None
        threading.Thread(target=self._read, name="rayhive-commands", daemon=True).start()

    def listen(self, listener: Callable[[commands.Command], None]) -> None:
        """Have every further command passed to a function, in the thread that reads commands."""
        self._listener = listener

    def emit(self, event: Event) -> None:
        """Send one event of the peer."""
        line = dump_event(event.of_peer(self.peer)) + "\n"
        with self._sending, contextlib.suppress(OSError):  # the reading thread handles a closed one
            self._connection.sendall(line.encode())

    def wait_for(self, kind: type[C]) -> C:
        """Return the next command of this kind; other commands are dropped.

        There is no timeout: the supervisor bounds every phase, and its end ends this process.

        Raises:
            GivenNotice: The peer got a preemption notice meanwhile.
        """
        while True:
            command = self._commands.get()
            if isinstance(command, kind):
                return command
            if isinstance(command, commands.Leave) and kind is not commands.Shutdown:
                raise GivenNotice

    def give_notice(
        self, deadline_s: float | None, fault: str | None = None, source: str | None = None
    ) -> None:
        """Note a preemption. Of several notices, the one with the earliest deadline counts.

        Args:
            deadline_s: Time left [s]; None to leave after the present round.
            fault: Id of the fault that sent the notice; None for a signal or a real notice.
            source: Name of the source of a real notice.
        """
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        if self.notice is None or deadline < self.notice:
            self.notice = deadline
            self._commands.put(commands.Leave())  # ends a wait for a command
            # from a thread: a signal handler may have interrupted this one in the middle of a send
            event = Notice(deadline_s=deadline_s, fault=fault, source=source)
            threading.Thread(target=self.emit, args=(event,), daemon=True).start()

    def fail(self, error: BaseException) -> None:
        """Report the error with which this peer fails; only the first one counts."""
        if not self.has_failed:
            self.has_failed = True
            text = "".join(traceback.format_exception(error))
            self.emit(PeerFailed(error=described(error), traceback=text))

    def say_goodbye(self, left: Left, samples: int = 0, clock_s: float = 0.0) -> None:
        """Report that this peer left after a notice, by default before it had begun to train.

        Args:
            left: Event with the last round and what became of the pending samples.
            samples: Samples that it has computed.
            clock_s: Its training time [s].
        """
        self.has_left = True
        self.emit(left)
        finished = PeerFinished(reason="notice", round=left.round, samples=samples, clock_s=clock_s)
        self.emit(finished)

    def _read(self) -> None:
        # a peer that ends with unread events resets the connection
        with contextlib.suppress(OSError), self._connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                command = commands.COMMANDS.validate_json(line)
                if isinstance(command, commands.Stop):
                    self.stop_reason = command.reason
                elif isinstance(command, commands.GiveNotice):
                    self.give_notice(command.deadline_s, command.fault, command.source)
                elif isinstance(command, commands.Leave):
                    self.give_notice(None, command.fault, command.source)
                elif isinstance(command, commands.WriteCheckpoint):
                    self.checkpoint_asked = True
                else:
                    self._commands.put(command)
                self._listener(command)
        os.killpg(os.getpgrp(), signal.SIGKILL)
