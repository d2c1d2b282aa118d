"""Answers of the network daemon to calls that were given up.

hivemind reads all answers to a process in one task. An answer to a call that was given up in the
same turn of the event loop raises there. The task then ends without a word: the process gets no
further answer, and answers no other peer.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

from hivemind.p2p.p2p_daemon_bindings.control import ControlClient

_plain_init = ControlClient.__init__


class PendingCalls(dict[UUID, asyncio.Future[bytes]]):
    """Calls of a process that wait for an answer of the daemon; a call given up does not."""

    def __contains__(self, call: object) -> bool:
        future = self.get(call)  # type: ignore[call-overload]
        return future is not None and not future.done()


def _init(self: Any, *args: Any, **kwargs: Any) -> None:
    _plain_init(self, *args, **kwargs)
    self._pending_calls = PendingCalls()


def keep_answering() -> None:
    """Let connections to daemons outlive answers to given-up calls, here and in later forks."""
    ControlClient.__init__ = _init
