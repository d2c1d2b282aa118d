"""The line between a peer process and the actor that hosts it: JSON lines over a socket."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import socket
import threading
import time
import traceback
from typing import Any

from rayhive.errors import described
from rayhive.events import dump_event, make_event


class GivenNotice(Exception):
    """This peer was told to leave before it had begun to train."""


class Channel:
    """A peer's end of the line.

    Commands are read in a thread, so that they arrive while the main thread trains. When the
    other end goes, the actor is dead and the peer has no right to live: its process group is
    killed at once.

    Args:
        connection: The socket.
        peer: The peer's name in its events.

    Attributes:
        stop_reason: Why training has to end; None as long as it has not.
        notice: When this peer will be taken away [s of ``time.monotonic``], infinite if it is to
            leave in its own time; None without a notice.
        has_left: Whether it has told what it leaves behind.
        has_failed: Whether it has told what it failed of.
        checkpoint_asked: Whether a checkpoint has to be written now.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self.stop_reason: str | None = None
        self.notice: float | None = None
        self.has_left = self.has_failed = self.checkpoint_asked = False
        self._connection = connection
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="rayhive-commands", daemon=True).start()

    def emit(self, kind: str, **fields: Any) -> None:
        """Send one event."""
        line = dump_event(make_event(kind, self.peer, **fields)) + "\n"
        with self._sending, contextlib.suppress(OSError):  # the reader sees that it is gone
            self._connection.sendall(line.encode())

    def wait_for(self, command: str) -> dict[str, Any]:
        """Return the next command of this name, dropping others.

        There is no timeout: the supervisor bounds every phase, and its end ends this process.

        Raises:
            GivenNotice: This peer has to leave, and there is nothing to wait for any more.
        """
        while True:
            message = self._commands.get()
            if message["do"] == command:
                return message
            if message["do"] == "leave" and command != "shutdown":
                raise GivenNotice

    def give_notice(self, deadline_s: float | None, fault: str | None = None) -> None:
        """Take notice that this peer will be taken away; the first word and the earliest count.

        Args:
            deadline_s: In how long [s]; None if it is to leave in its own time.
            fault: Id of the fault on whose behalf it is told; None for a signal.
        """
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        if self.notice is None or deadline < self.notice:
            self.notice = deadline
            self._commands.put({"do": "leave"})  # for whom it finds waiting
            # a signal may have interrupted this very thread while it was sending
            told = {"deadline_s": deadline_s, "fault": fault}
            threading.Thread(target=self.emit, args=("notice",), kwargs=told, daemon=True).start()

    def fail(self, error: BaseException) -> None:
        """Tell what this peer fails of, once, and before it tries to clear up."""
        if not self.has_failed:
            self.has_failed = True
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            self.emit("peer_failed", error=described(error), traceback="".join(lines))

    def say_goodbye(
        self, *, round_: int, samples: int, clock_s: float, handed_over: int, lost: int
    ) -> None:
        """Tell what a peer that was given notice leaves behind, and that it has finished."""
        self.has_left = True
        self.emit("left", round=round_, handed_over=handed_over, lost=lost)
        self.emit("peer_finished", reason="notice", round=round_, samples=samples, clock_s=clock_s)

    def _read(self) -> None:
        # an end that goes with events unread resets the line
        with contextlib.suppress(OSError), self._connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                if message["do"] == "stop":
                    self.stop_reason = str(message.get("reason", "stop"))
                elif message["do"] == "notice":
                    self.give_notice(float(message["deadline_s"]), message.get("fault"))
                elif message["do"] == "leave":
                    self.give_notice(None, message.get("fault"))
                elif message["do"] == "checkpoint":
                    self.checkpoint_asked = True
                else:
                    self._commands.put(message)
        os.killpg(os.getpgrp(), signal.SIGKILL)
