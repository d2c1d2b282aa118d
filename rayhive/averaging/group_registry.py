"""Which all-reduce groups this peer is about to run, runs, or has run.

A groupmate may send its first part before this peer has registered the group. hivemind lets the
part wait for an event that *any* group sets when it begins or ends; the part is then refused
with BAD_GROUP_ID and the sender reports a partial round. Here a part waits for its own group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

#: Ids of closed groups that are remembered, so that late parts are refused at once.
REMEMBERED = 256


class GroupRegistry:
    """The state of every group that this peer knows, for one event loop."""

    def __init__(self) -> None:
        self._expected: set[bytes] = set()
        self._open: set[bytes] = set()
        self._closed: deque[bytes] = deque(maxlen=REMEMBERED)
        self._changed = asyncio.Event()

    def expect(self, group_id: bytes) -> None:
        """Note a group that is assembled and will be opened, or dropped, by its step."""
        self._expected.add(group_id)
        self._notify()

    def open(self, group_id: bytes, allreduce_ids: Iterable[bytes]) -> None:
        """Note that the all-reduces of a group now accept parts."""
        self._expected.discard(group_id)
        self._open.update(allreduce_ids)
        self._notify()

    def close(self, group_id: bytes, allreduce_ids: Iterable[bytes] = ()) -> None:
        """Note that a group is over, or will never be opened."""
        self._expected.discard(group_id)
        for allreduce_id in (group_id, *allreduce_ids):
            self._open.discard(allreduce_id)
            self._closed.append(allreduce_id)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def opened(self, allreduce_id: bytes, patience: float) -> bool:
        """Wait until parts of an all-reduce are accepted.

        A group that is assembled here is waited for until its step opens or drops it: the sender
        has its own limit. A group that nobody here has heard of gets ``patience`` seconds.

        Args:
            allreduce_id: Id of the group, followed by the name of a phase if it has several.
            patience: Seconds to wait for an unknown group.

        Returns:
            Whether the all-reduce is open.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while allreduce_id not in self._open:
            if any(allreduce_id.startswith(closed) for closed in self._closed):
                return False
            limit = None
            if not any(allreduce_id.startswith(expected) for expected in self._expected):
                limit = deadline - loop.time()
                if limit <= 0:
                    return False
            waiting = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait({waiting}, timeout=limit)
            waiting.cancel()
        return True
