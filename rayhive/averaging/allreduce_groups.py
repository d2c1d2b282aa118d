"""Registry of the all-reduces of one averager: expected, running and over.

The first part of a group member may arrive before this peer has registered the group. In hivemind
the part waits for an event that is set when *any* group begins or ends. It is then refused with
BAD_GROUP_ID, and the sender reports a partial round. Here a part waits for its own group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import achain, anext, as_aiter

from rayhive.averaging.allreduce import MeasuredAllReduce
from rayhive.averaging.parts import PartMessage
from rayhive.membership.event_loop import Notifier, wait_at_most

#: Number of closed groups to remember; late parts of these are refused at once.
REMEMBERED = 256
#: Phase name of a round that averages the tensors themselves in one all-reduce.
DENSE = "dense"


def allreduce_id(group_id: bytes, phase: str) -> bytes:
    """Return the id of one all-reduce of a group, equal to hivemind's where hivemind has one."""
    return group_id if phase == DENSE else group_id + f"PHASE_{phase}".encode()


class AllReduceGroups:
    """State of every group that this peer knows, on one event loop.

    Attributes:
        running: Future of the runner of each registered all-reduce, by id. hivemind's averager
            sets the results.
        absent: Ids of peers that were lost; no all-reduce waits for them.
        parted: Peers that left and cannot be heard any more. Parts of them that have arrived count.
    """

    def __init__(self) -> None:
        self.running: dict[bytes, asyncio.Future[MeasuredAllReduce]] = {}
        self.absent: frozenset[bytes] = frozenset()
        self.parted: frozenset[PeerID] = frozenset()
        self._ids: dict[bytes, dict[str, bytes]] = {}
        self._expected: set[bytes] = set()
        self._closed: deque[bytes] = deque(maxlen=REMEMBERED)
        self._changes = Notifier()

    def expect(self, group_id: bytes) -> None:
        """Note an assembled group, which its step will either open or close."""
        self._expected.add(group_id)
        self._changes.notify()

    @contextmanager
    def opened(self, group_id: bytes, phases: Sequence[str]) -> Iterator[None]:
        """Accept parts of a group's all-reduces as long as the context is active.

        Args:
            group_id: The group.
            phases: Names of its all-reduces, in order.
        """
        ids = self._ids[group_id] = {phase: allreduce_id(group_id, phase) for phase in phases}
        futures: dict[bytes, asyncio.Future[MeasuredAllReduce]]
        futures = {key: asyncio.Future() for key in ids.values()}
        self.running.update(futures)
        self._expected.discard(group_id)
        self._changes.notify()
        try:
            yield
        finally:
            for key, future in futures.items():
                self.running.pop(key, None)
                future.cancel()  # releases parts that wait for an all-reduce that never began
            self.close(group_id)

    def close(self, group_id: bytes) -> None:
        """Note that a group is over, or will never be opened."""
        self._expected.discard(group_id)
        self._ids.pop(group_id, None)
        self._closed.append(group_id)
        self._changes.notify()

    async def aggregate(
        self, stream: AsyncIterator[Any], context: Any, patience: float
    ) -> AsyncGenerator[Any, None]:
        """Pass a group member's parts to the all-reduce they belong to, once it runs here.

        Args:
            stream: The parts, the first of which names the all-reduce.
            context: The call, with the id of the member.
            patience: As for :meth:`runner`.
        """
        request = await anext(stream)
        runner = await self.runner(request.group_id, patience)
        if runner is None:
            yield PartMessage(averaging_pb2.BAD_GROUP_ID)
            return
        answers: Any = runner.rpc_aggregate_part(achain(as_aiter(request), stream), context)
        async with aclosing(answers):
            async for message in answers:
                yield message

    async def runner(self, key: bytes, patience: float) -> MeasuredAllReduce | None:
        """Wait until an all-reduce runs here; return None if it never does.

        The wait for an assembled group has no limit here: its step opens or closes it, and the
        sender has a limit of its own.

        Args:
            key: Id of the all-reduce.
            patience: Longest wait for a group that this peer does not know [s].
        """
        if not await self._is_open(key, patience):
            return None
        future = self.running[key]
        # Not awaited directly: a sender that hangs up would cancel it for all.
        await asyncio.wait({future})
        return None if future.cancelled() else future.result()

    async def _is_open(self, key: bytes, patience: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while key not in self.running:
            if any(key.startswith(closed) for closed in self._closed):
                return False
            is_expected = any(key.startswith(expected) for expected in self._expected)
            left = None if is_expected else deadline - loop.time()
            if left is not None and left <= 0:
                return False
            await wait_at_most(self._changes.next_change(), left)
        return True

    async def begin(self, key: bytes, runner: MeasuredAllReduce) -> None:
        """Begin an all-reduce of an open group.

        Args:
            key: Id of the all-reduce.
            runner: Takes part in it for this peer.
        """
        self.running[key].set_result(runner)
        await runner.give_up(self.parted)

    def started(self, group_id: bytes) -> dict[str, MeasuredAllReduce]:
        """Return the all-reduces of a group that began, by phase, in order."""
        ids = self._ids.get(group_id, {})
        return {phase: found for phase, key in ids.items() if (found := self._started(key))}

    def moved(self, group_id: bytes) -> int:
        """Return the bytes of a group's all-reduces that arrived or left so far."""
        return sum(r.sent_bytes + r.received_bytes for r in self.started(group_id).values())

    def _started(self, key: bytes) -> MeasuredAllReduce | None:
        future = self.running.get(key)
        if future is None or not future.done() or future.cancelled():
            return None
        return future.result()

    def _all_started(self) -> list[MeasuredAllReduce]:
        return [found for key in self.running if (found := self._started(key))]

    def unfinished(self, group_id: bytes) -> list[bytes]:
        """Return the ids of a group's all-reduces in which other members may wait for this peer."""
        keys = self._ids.get(group_id, {}).values()
        return [key for key in keys if (found := self._started(key)) is None or not found.succeeded]

    async def set_absent(self, absent: frozenset[bytes]) -> None:
        """Replace the ids of lost peers; running all-reduces stop waiting for the new ones."""
        gone, self.absent = absent - self.absent, absent
        for runner in self._all_started() if gone else ():
            await runner.forget(gone)

    async def set_parted(self, parted: frozenset[PeerID]) -> None:
        """Replace the peers that left and cannot be heard; no first part of them is awaited."""
        gone, self.parted = parted - self.parted, parted
        for runner in self._all_started() if gone else ():
            await runner.give_up(gone)

    def cancel(self) -> None:
        """End all running all-reduces."""
        for runner in self._all_started():
            runner.finalize(cancel=True)
        for future in self.running.values():
            future.cancel()
