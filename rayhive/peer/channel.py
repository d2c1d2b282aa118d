"""The line between a peer process and the actor that hosts it: JSON lines over a socket."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import threading
from typing import Any

from rayhive.events import dump_event, make_event


class Channel:
    """A peer's end of the line.

    Commands are read in a thread, so that they arrive while the main thread trains. When the
    other end goes, the actor is dead and the peer has no right to live: its process group is
    killed at once.

    Args:
        connection: The socket.
        peer: The peer's name in its events.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.peer = peer
        self.stop_reason: str | None = None
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
        """
        while True:
            message = self._commands.get()
            if message["do"] == command:
                return message

    def _read(self) -> None:
        # an end that goes with events unread resets the line
        with contextlib.suppress(OSError), self._connection.makefile(encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                if message["do"] == "stop":
                    self.stop_reason = str(message.get("reason", "stop"))
                else:
                    self._commands.put(message)
        os.killpg(os.getpgrp(), signal.SIGKILL)
