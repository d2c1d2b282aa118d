"""Ends of the pipe between the trainer and an averager's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

from hivemind.utils import SerializerBase, get_logger

logger = get_logger(__name__)


class LockedPipe:
    """The trainer's end of an averager's pipe, safe to send through from several threads."""

    def __init__(self, pipe: Any) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def send(self, message: Any) -> None:
        """Send one message."""
        with self._lock:
            self._pipe.send(message)


class RequestPipe:
    """The averager's end of its pipe, of which hivemind's loop reads nothing but ``_shutdown``.

    hivemind's reader releases a semaphore in each turn of the event loop in which a message is
    there. Its task needs several turns to wake up, and then looks for one more message for each of
    them, with a timer and a task every time. A message that is there while the averager starts
    takes thousands of turns, so that hivemind's loop gets its first one from :meth:`open`.

    Args:
        pipe: The end of the pipe.
        averager: The averager, which gets the method ``_serve_requests``.
    """

    def __init__(self, pipe: Any, averager: Any) -> None:
        self._pipe, self._averager = pipe, averager
        self._tasks: set[asyncio.Task[Any]] = set()
        near, self._far = Pipe(duplex=False)
        self.fileno, self.poll, self.recv = near.fileno, near.poll, near.recv
        averager._serve_requests = self._serve

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def open(self) -> None:
        """Serve requests as soon as hivemind's loop reads messages."""
        self._far.send(("_serve_requests", [], {}))

    async def _serve(self) -> None:
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._read)

    def _read(self) -> None:
        """Start the method that the trainer asks for."""
        loop = asyncio.get_running_loop()
        try:
            method, args, kwargs = message = self._pipe.recv()
        except EOFError:  # the trainer has ended
            loop.remove_reader(self._pipe.fileno())
            self._far.close()
        except (OSError, RuntimeError) as error:
            logger.exception(error)
        else:
            if method == "_shutdown":
                loop.remove_reader(self._pipe.fileno())
                self._far.send(message)
                return
            task = loop.create_task(getattr(self._averager, method)(*args, **kwargs))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def serve_states(
    serializer: SerializerBase, pipe: Any, state_of: Callable[[], Callable[[], Any] | None]
) -> None:
    """Answer an averager's requests for the trainer's state until the averager ends.

    It replaces hivemind's function, whose loop keeps the last request and a copy of the whole state
    until the next request.

    Args:
        serializer: Serialises the metadata.
        pipe: The trainer's end of the averager's pipe.
        state_of: Weak reference to the averager's ``get_current_state``.
    """
    while _serve_state(serializer, pipe, state_of):
        pass


def _serve_state(
    serializer: SerializerBase, pipe: Any, state_of: Callable[[], Callable[[], Any] | None]
) -> bool:
    """Answer one request, and return whether there may be another one."""
    try:
        _, future = pipe.recv()
    except (EOFError, OSError):  # the averager has ended
        return False
    state = None if future is None else state_of()
    if state is None:
        return False
    try:
        metadata, tensors, infos = state()
        # Without initialising CUDA in the averager's process.
        tensors = tuple(t.cpu().detach().requires_grad_(t.requires_grad) for t in tensors)
        future.set_result((serializer.dumps(metadata), tensors, infos))
    except Exception as error:
        future.set_exception(error)
        logger.warning(f"the state was not sent: {error!r}")
    return True
