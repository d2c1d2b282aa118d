"""An averager that measures its rounds, follows the live peers and does not lose early parts.

The measuring happens in hivemind's averager process, which is forked from the trainer's. There,
and only there, hivemind's own matchmaking, all-reduce and table of codecs are replaced by ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, AsyncIterator, ClassVar, cast  # noqa: UP035 - hivemind wants typing's

from hivemind.averaging import DecentralizedAverager, averager
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.dht import DHT, DHTNode
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_dht_time
from hivemind.utils.asyncio import achain, anext, as_aiter

from rayhive.averaging.allreduce import MeasuredAllReduce
from rayhive.averaging.group_formation import DifferentTensors, NoOtherPeers, RoundIsOver
from rayhive.averaging.matchmaking import TRACE, LiveMatchmaking, StepTrace, round_of
from rayhive.averaging.round_result import RoundResult
from rayhive.averaging.step_history import ROUNDS_KEPT, OneAtATime
from rayhive.averaging.streams import COURTESY, PATIENCE, DownloadStub, stay_open
from rayhive.compression.kernels import install
from rayhive.compression.powersgd.shapes import MAX_ITERATIONS, phase_names
from rayhive.membership.member import Member

#: Longest wait for a groupmate's next part [s], if nothing asks for another.
SENDER_TIMEOUT = 10.0
#: Longest wait for replies that are still leaving when our own part of a round is done [s].
DRAIN_PATIENCE = 2.0
#: Longest waits at shutdown for steps and for the DHT [s]; hivemind terminates after 5 s.
STEP_PATIENCE, FLUSH_PATIENCE = 0.7, 2.5
#: Shortest time between two announcements that the state can be had here [s].
DECLARE_PAUSE_S = 1.0
#: Longest goodbye to a groupmate after a failure [s].
GOODBYE_S = 2.0
#: What is appended to a group's id for each of its all-reduces, the first three by hivemind.
PHASE_NAMES = {b"": "dense"} | {
    f"PHASE_{name}".encode(): name for name in phase_names(MAX_ITERATIONS)
}


class MeasuredAverager(DecentralizedAverager):
    """Mixin that stands first among the bases of an averager.

    :class:`rayhive.averaging.step_history.RecordedSteps` stands last among them.
    ``StepControl.result()`` is a :class:`RoundResult`. Timeouts differ from hivemind's: those of
    an all-reduce do not follow the matchmaking window, and ``request_timeout`` stays below it.

    Args:
        args: As the averager's.
        start: Start the averager's process at once.
        target_group_size: Size of a complete group as long as the members are not known, see
            :meth:`set_members`.
        min_matchmaking_time: Longest wait for a group [s].
        request_timeout: Longest wait for a leader's answer [s]; cut to half the window, because
            two peers that ask each other are stuck until it ends.
        allreduce_timeout: Longest all-reduce [s].
        next_chunk_timeout: Longest wait for a part [s]. hivemind's optimizer passes the
            matchmaking window here when nobody chose; that is not taken as a choice.
        sender_timeout: The same for senders only; default a quarter of ``allreduce_timeout``, at
            most 10 s, so that a round with a silent groupmate ends before it is given up.
        reducer_timeout: Longest wait for a reducer's answer [s]; default twice that.
        kwargs: As the averager's.
    """

    #: The class that peers believe to talk to: RPCs are named after it.
    wire_name: ClassVar[str]
    _matchmaking: LiveMatchmaking
    # A class inherits the stubs that hivemind made for its parent, under the parent's RPC names.
    _rpc_handlers = None
    _stub_type = None

    def __init__(
        self,
        *args: Any,
        start: bool,
        target_group_size: int | None = None,
        min_matchmaking_time: float = 5.0,
        request_timeout: float = 3.0,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        if next_chunk_timeout is None or next_chunk_timeout == min_matchmaking_time:
            next_chunk_timeout = SENDER_TIMEOUT
            if allreduce_timeout is not None:
                next_chunk_timeout = min(next_chunk_timeout, allreduce_timeout / 4)
        sender_timeout = next_chunk_timeout if sender_timeout is None else sender_timeout
        self._steps: deque[StepControl] = deque()
        self._outcomes: deque[RoundResult] = deque(maxlen=ROUNDS_KEPT)
        self._lost: frozenset[bytes] = frozenset()
        # These live in the averager's process.
        self._failed_searches = 0
        self._failed_bytes = 0
        self._running_steps: dict[asyncio.Task[Any], StepControl] = {}
        self._goodbyes: set[asyncio.Task[None]] = set()
        self._declaring: asyncio.Task[None] | None = None
        super().__init__(
            *args,
            start=False,
            target_group_size=target_group_size,
            min_matchmaking_time=min_matchmaking_time,
            request_timeout=min(request_timeout, 0.5 * min_matchmaking_time),
            allreduce_timeout=allreduce_timeout,
            next_chunk_timeout=next_chunk_timeout,
            sender_timeout=sender_timeout,
            reducer_timeout=2 * sender_timeout if reducer_timeout is None else reducer_timeout,
            **kwargs,
        )
        self._outer_pipe: Any = OneAtATime(self._outer_pipe)
        if start:
            self.run_in_background(await_ready=True)

    def __del__(self) -> None:
        if hasattr(self, "_parent_pid"):  # else it was refused before it became a process
            super().__del__()

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        name = f"{cls.wire_name}.{method_name}"
        return name if namespace is None else f"{namespace}::{name}"

    def set_members(self, members: Sequence[Member], lost: frozenset[bytes] = frozenset()) -> None:
        """Say who takes part in the run, the oldest peer first, and who is gone without a word.

        It may be called at any time and from any thread. A search that is under way follows. No
        all-reduce waits for the lost, nor does one that begins later: a group may form with
        somebody who is lost then. Who says goodbye finishes its rounds, and is waited for there.
        Without a live averager it does nothing.
        """
        with contextlib.suppress(OSError, ValueError, AssertionError):
            if self.pid is not None and self.is_alive():
                self._outer_pipe.send(("_set_members", [tuple(members), lost], {}))

    async def _set_members(self, members: Sequence[Member], lost: frozenset[bytes]) -> None:
        gone, self._lost = lost - self._lost, lost
        self._matchmaking.set_members(members, self._allreduce_timeout)
        for future in self._running_groups.values() if gone else ():
            if future.done() and not future.cancelled():
                await future.result().forget(gone)

    def run(self) -> None:
        """Serve until shut down; executed in the averager's own process."""
        averager.Matchmaking = LiveMatchmaking
        averager.AllReduceRunner = MeasuredAllReduce
        install.install()
        # Group ids and orders come from this generator. Peers that seed alike for the sake of
        # training would draw the same ids, and one group's late parts would fit another.
        random.seed()
        gc.freeze()  # else the collector unshares all the memory that came with the fork
        super().run()

    async def _shutdown(self, timeout: float | None) -> None:
        """End every step, then leave no message behind that the DHT could not read.

        Messages to the DHT refer to file descriptors of this process. One that arrives after its
        sender is gone crashes the DHT, or makes it pause for longer than its own shutdown may
        take; its p2pd then outlives it. A search for a group sends them all the time.
        """
        if self._declaring is not None:
            self._declaring.cancel()  # it sends one whenever what can be had here changes
        for step in self._running_steps.values():
            with contextlib.suppress(Exception):
                MPFuture.cancel(step)  # the trainer's side answers with what ends the search
        for future in self._running_groups.values():
            if future.done() and not future.cancelled():
                future.result().finalize(cancel=True)
            future.cancel()
        for insist in (False, True):
            tasks = set(self._running_steps)
            for task in tasks if insist else ():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=STEP_PATIENCE)
        self._running_groups.clear()
        with contextlib.suppress(Exception):  # held from here on: no search begins any more
            lock = self._matchmaking.lock_looking_for_group
            await asyncio.wait_for(lock.acquire(), STEP_PATIENCE)
        try:
            await super()._shutdown(timeout)
        finally:
            with contextlib.suppress(Exception):
                read = self.dht.run_coroutine(_nothing, return_future=True)
                await asyncio.wait_for(read, FLUSH_PATIENCE)
            await self._p2p.shutdown()  # removes this process's socket file

    async def _step(self, *, step: StepControl, future_for_init: MPFuture) -> None:
        trace, task = StepTrace(), cast("asyncio.Task[Any]", asyncio.current_task())
        TRACE.set(trace)  # for this step alone: it runs as a task
        self._running_steps[task] = step
        watcher = asyncio.create_task(_note_trigger(step, trace))
        try:
            await super()._step(step=step, future_for_init=future_for_init)
        except (NoOtherPeers, RoundIsOver, DifferentTensors):
            pass  # the trainer has it from the step
        finally:
            round_ = round_of(step)
            if round_ is not None:
                self._matchmaking.group_formation.leave_behind(round_)
            watcher.cancel()
            del self._running_steps[task]
            for group_id in trace.groups:
                self._matchmaking.groups.close(group_id)
            if not step.cancelled():
                self._failed_searches += len(trace.searches)
                self._failed_bytes += trace.wasted_bytes

    @contextlib.contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        groups, before = self._matchmaking.groups, set(self._running_groups)
        with super()._register_allreduce_group(group_info):
            futures = {k: v for k, v in self._running_groups.items() if k not in before}
            groups.open(group_info.group_id, futures)
            try:
                yield
            finally:
                groups.close(group_info.group_id, futures)
                for future in futures.values():
                    future.cancel()  # lets go of parts that wait for what will never begin

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> RoundResult:
        trace = TRACE.get() or StepTrace()
        began = time.monotonic()
        try:
            gathered = await super()._aggregate_with_group(
                group_info, min_vector_size=min_vector_size, **kwargs
            )
        except BaseException:
            runners = self._runners(group_info.group_id).values()
            trace.wasted_bytes += sum(runner.sent_bytes for runner in runners)
            self._take_leave(group_info)
            raise
        ended = time.monotonic()
        patience = DRAIN_PATIENCE
        if self._allreduce_timeout is not None:  # it goes on while we wait
            patience = min(patience, (self._allreduce_timeout - (ended - began)) / 4)
        phases = self._runners(group_info.group_id)
        drained = [await runner.drain(patience) for runner in phases.values()]
        result = RoundResult(
            gathered,
            phases=tuple(runner.record(name) for name, runner in phases.items()),
            wasted_bytes=self._failed_bytes + trace.wasted_bytes,
            banned=tuple(sorted({peer for runner in phases.values() for peer in runner.banned()})),
            failures=tuple(text for runner in phases.values() for text in runner.failures),
            matchmaking_s=trace.waited(),
            allreduce_s=ended - began,
            attempts=max(1, self._failed_searches + len(trace.searches)),
            counts_complete=all(drained),
        )
        # Told once; what this step has left is added when it ends.
        self._failed_searches = self._failed_bytes = trace.wasted_bytes = 0
        trace.searches.clear()
        return result

    async def _run_allreduce_inplace_(
        self, tensors: Any, group_info: GroupInfo, group_id: bytes | None = None, **options: Any
    ) -> None:
        """Run one all-reduce, without those who were lost while the group formed.

        They may be back, which only others know so far: then they must not wait for this one.
        """
        options["absent"] = self._lost
        lost = [peer for peer in group_info.peer_ids if peer.to_bytes() in self._lost]
        self._say_goodbye(lost, [group_info.group_id if group_id is None else group_id])
        await super()._run_allreduce_inplace_(tensors, group_info, group_id, **options)

    async def _declare_for_download_periodically(self) -> None:
        """Say in the DHT that the state can be had here, as hivemind does, but not all the time.

        hivemind says so after every tensor that was averaged, several times a round.
        """
        self._declaring = asyncio.current_task()
        key = f"{self._matchmaking.group_key_manager.prefix}.all_averagers"
        shared = self.allow_state_sharing
        while True:
            self._state_updated.clear()
            expiration = get_dht_time() + self.declare_state_period
            if self.allow_state_sharing or shared:  # once more when it ends, to take it back
                shared = self.allow_state_sharing
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(
                        self.dht.store(
                            key,
                            subkey=self.peer_id.to_bytes(),
                            value=self.state_sharing_priority if shared else None,
                            expiration_time=expiration,
                            return_future=True,
                        ),
                        self.declare_state_period,
                    )
            await asyncio.sleep(DECLARE_PAUSE_S)
            left = expiration - get_dht_time()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._state_updated.wait(), max(0.0, left))

    def _take_leave(self, group_info: GroupInfo) -> None:
        """Tell a group that nothing more comes from here, so that nobody waits for it."""
        unfinished = [
            key
            for key, future in self._running_groups.items()
            if key.startswith(group_info.group_id)
            and (not future.done() or future.cancelled() or not future.result().ended)
        ]
        self._say_goodbye([p for p in group_info.peer_ids if p != self.peer_id], unfinished)

    def _say_goodbye(self, peers: Sequence[PeerID], allreduce_ids: list[bytes]) -> None:
        for peer in peers:
            task = asyncio.create_task(self._tell_of_leave(peer, allreduce_ids))
            self._goodbyes.add(task)
            task.add_done_callback(self._goodbyes.discard)

    async def _tell_of_leave(self, peer: PeerID, allreduce_ids: list[bytes]) -> None:
        stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
        for allreduce_id in allreduce_ids:
            word = averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED, group_id=allreduce_id)
            with contextlib.suppress(Exception):  # it may have left, too
                answers = await asyncio.wait_for(stub.rpc_aggregate_part(as_aiter(word)), GOODBYE_S)
                async with contextlib.aclosing(answers):
                    await asyncio.wait_for(anext(answers), GOODBYE_S)

    def _runners(self, group_id: bytes) -> dict[str, MeasuredAllReduce]:
        """Return the all-reduces of a group that began, by the names of their phases."""
        return {
            PHASE_NAMES[key.removeprefix(group_id)]: future.result()
            for key, future in self._running_groups.items()
            if key.startswith(group_id) and future.done() and not future.cancelled()
        }

    @classmethod
    def get_stub(cls, p2p: P2P, peer: PeerID, *, namespace: str | None = None) -> DownloadStub:
        """Return the remote side of a peer."""
        return DownloadStub(super().get_stub(p2p, peer, namespace=namespace))

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Lead a peer as hivemind does, and let it hang up when it has the last word."""
        async with contextlib.aclosing(super().rpc_join_group(request, context)) as messages:
            async for message in messages:
                yield message
        await stay_open(PATIENCE)

    async def rpc_download_state(
        self, _request: averaging_pb2.DownloadRequest, _context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Send the state as hivemind does, then an empty message that says it is complete."""
        anything = False
        async with contextlib.aclosing(super().rpc_download_state(_request, _context)) as parts:
            async for part in parts:
                anything = True
                yield part
        if anything:
            yield averaging_pb2.DownloadData()
            await stay_open(COURTESY)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Hand a groupmate's parts to the all-reduce they belong to, once it is there."""
        request = await anext(stream)
        group_id = request.group_id
        patience = self.allreduce_kwargs["sender_timeout"]
        future = None
        if await self._matchmaking.groups.opened(group_id, patience):
            future = self._running_groups.get(group_id)
        if future is not None:
            # Not awaited directly: a sender that hangs up meanwhile would cancel it for all.
            await asyncio.wait({future})
        if future is None or future.cancelled():
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            return
        answers = future.result().rpc_aggregate_part(achain(as_aiter(request), stream), context)
        async with contextlib.aclosing(answers):
            async for message in answers:
                yield message


async def _nothing(dht: DHT, node: DHTNode) -> None:
    """Do nothing in the DHT's process, after all that it was sent before."""


async def _note_trigger(step: StepControl, trace: StepTrace) -> None:
    with contextlib.suppress(Exception):
        await step.wait_for_trigger()
        trace.triggered = time.monotonic()
