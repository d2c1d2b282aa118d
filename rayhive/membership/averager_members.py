"""Members of the run as a peer's averagers know them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rayhive.membership.view import Member

#: The members for a kind of averaging, oldest first, and the ids of the lost peers.
Members = tuple[tuple[Member, ...], frozenset[bytes]]
#: Takes a kind of averaging and its :data:`Members`.
OnMembers = Callable[[str, tuple[Member, ...], frozenset[bytes]], None]


class AveragerMembers:
    """Passes the members of the run on to the averagers, from several threads.

    Args:
        on_members: Called for each kind of averaging whose members have changed.
    """

    def __init__(self, on_members: OnMembers) -> None:
        self._on_members, self._lock = on_members, threading.Lock()
        self._passed_on: dict[str, Members] = {}

    def pass_on(self, members: Callable[[], dict[str, Members]]) -> None:
        """Pass on the present members.

        Args:
            members: Returns them. It is called under a lock, so that the newest come last.
        """
        with self._lock:
            for kind, present in members().items():
                if present != self._passed_on.get(kind):
                    self._passed_on[kind] = present
                    self._on_members(kind, *present)
