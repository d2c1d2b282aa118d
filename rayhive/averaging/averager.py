"""Averager that composes rayhive's group formation, all-reduce, outlier filter and payload policy.

hivemind runs an averager in a process that is forked from the trainer's. In that process, and only
there, hivemind's matchmaking, all-reduce and table of codecs are replaced by rayhive's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind wants typing's

import torch
from hivemind.averaging import DecentralizedAverager, averager
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_dht_time
from hivemind.utils.asyncio import achain, anext, as_aiter

from rayhive.averaging.allreduce import MeasuredAllReduce
from rayhive.averaging.allreduce_groups import AllReduceGroups
from rayhive.averaging.cancellation import Cancellations
from rayhive.averaging.excluded import ExcludedRoundFailed, blank_copies
from rayhive.averaging.group_formation import DifferentTensors, NoOtherPeers, RoundIsOver
from rayhive.averaging.matchmaking import TRACE, LiveMatchmaking, StepTrace, round_of
from rayhive.averaging.outlier_filter import OutlierFilter
from rayhive.averaging.payload_policy import DensePayload, PayloadPolicy
from rayhive.averaging.round_filter import AverageNotFinite, RoundFilter
from rayhive.averaging.round_pipeline import RoundPipeline, Weighting, step_weight
from rayhive.averaging.round_result import RoundResult
from rayhive.averaging.running_steps import STEP_PATIENCE, RunningSteps, flush
from rayhive.averaging.state_download import DownloadOutcome, StateDownload
from rayhive.averaging.state_sharing import SharedStates, declare_state, sharing_key
from rayhive.averaging.step_history import LockedPipe, StepHistory
from rayhive.averaging.streams import COURTESY, PATIENCE, DownloadStub, stay_open
from rayhive.averaging.timeouts import AveragingTimeouts
from rayhive.compression.kernels import install
from rayhive.membership.member import Member
from rayhive.spec import Aggregation

#: Errors that end a step without a retry; the trainer gets them from the step.
ENDED = (NoOtherPeers, RoundIsOver, DifferentTensors, AverageNotFinite, ExcludedRoundFailed)
#: Makes the payload policy of an averager from its averaged tensors.
PayloadFactory = Callable[[Sequence[torch.Tensor]], PayloadPolicy]


class MeasuredAverager(DecentralizedAverager):
    """Averager whose rounds are measured, filtered, and formed by the live peers.

    It comes last among the bases of an averager, behind hivemind's own class.
    ``StepControl.result()`` is a :class:`RoundResult`. Timeouts follow
    :class:`rayhive.averaging.timeouts.AveragingTimeouts` and not the matchmaking window.

    Args:
        args: As hivemind's.
        start: Start the averager's process at once.
        payload: Makes the payload policy; None averages the tensors themselves.
        outlier_filter: Rule and memory of the outlier filter; equal rules for all peers of a swarm.
        aggregation: Aggregation rule of reducers; equal for all peers of a swarm.
        weighting: Weight of this peer in a round.
        target_group_size: Size of a complete group as long as the members are not known, see
            :meth:`set_members`.
        min_matchmaking_time: Longest wait for a group [s].
        allreduce_timeout: Longest all-reduce [s].
        request_timeout, next_chunk_timeout, sender_timeout, reducer_timeout: See
            :meth:`AveragingTimeouts.derived`.
        kwargs: As hivemind's.

    Attributes:
        payload: The payload policy.
        groups: All-reduces of this averager, in its process.
        cancellations: Sender of cancellation messages, in its process.
        refused_states: Refused states since the list was last emptied, as in
            :class:`DownloadOutcome`.
        downloaded_bytes: Bytes received of states so far, refused ones included.
    """

    #: Class name in the names of the RPCs; peers with different names never find each other.
    wire_name: ClassVar[str]
    cancellations: Cancellations
    _matchmaking: LiveMatchmaking

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A class would inherit the stubs that hivemind made for its parent, with its RPC names.
        cls._rpc_handlers = cls._stub_type = None

    def __init__(
        self,
        *args: Any,
        start: bool,
        payload: PayloadFactory | None = None,
        outlier_filter: OutlierFilter | None = None,
        aggregation: Aggregation = "mean",
        weighting: Weighting = step_weight,
        target_group_size: int | None = None,
        min_matchmaking_time: float = 5.0,
        request_timeout: float = 3.0,
        allreduce_timeout: float | None = None,
        next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        timeouts = AveragingTimeouts.derived(
            min_matchmaking_time,
            request_timeout,
            allreduce_timeout,
            next_chunk_timeout,
            sender_timeout,
            reducer_timeout,
        )
        self.refused_states: list[dict[str, Any]] = []
        self.downloaded_bytes = 0
        self._history = StepHistory()
        # The rest is used in the averager's process only.
        self.groups = AllReduceGroups()
        self._steps = RunningSteps()
        self._declaring: asyncio.Task[None] | None = None
        super().__init__(
            *args,
            start=False,
            target_group_size=target_group_size,
            min_matchmaking_time=min_matchmaking_time,
            allreduce_timeout=allreduce_timeout,
            request_timeout=timeouts.request,
            next_chunk_timeout=timeouts.next_chunk,
            sender_timeout=timeouts.sender,
            reducer_timeout=timeouts.reducer,
            **kwargs,
        )
        self._running_groups = self.groups.running
        self._outer_pipe: Any = LockedPipe(self._outer_pipe)
        self.payload = DensePayload() if payload is None else payload(self._averaged_tensors)
        self.rounds = RoundPipeline(
            self._averaged_tensors,
            self.payload,
            RoundFilter(outlier_filter or OutlierFilter()),
            self.groups,
            aggregation=aggregation,
            weighting=weighting,
        )
        if start:
            self.run_in_background(await_ready=True)

    def __del__(self) -> None:
        if hasattr(self, "_parent_pid"):  # else the constructor failed before hivemind's
            super().__del__()

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        name = f"{cls.wire_name}.{method_name}"
        return name if namespace is None else f"{namespace}::{name}"

    def set_members(self, members: Sequence[Member], lost: frozenset[bytes] = frozenset()) -> None:
        """Set the peers that take part in the run.

        It may be called at any time and from any thread, also during a search for a group. It has
        no effect when the averager's process is not alive.

        Args:
            members: The peers, oldest first.
            lost: Ids of peers that were lost without a word. No all-reduce waits for them, nor
                does a later one if a group forms with them. A peer that left with a message
                finishes its rounds, and is awaited in them.
        """
        with contextlib.suppress(OSError, ValueError, AssertionError):
            if self.pid is not None and self.is_alive():
                self._outer_pipe.send(("_set_members", [tuple(members), lost], {}))

    def step(
        self,
        gather: Any = None,
        scheduled_time: float | None = None,
        weight: float | None = None,
        timeout: float | None = None,
        allow_retries: bool = True,
        require_trigger: bool = False,
        wait: bool = True,
    ) -> Any:
        """Run a step as hivemind does, and keep its outcome for :meth:`take_rounds`.

        hivemind waits for ever for an averager that does not accept the step.

        Raises:
            ValueError: ``wait`` and ``require_trigger`` are both set.
            TimeoutError: The averager does not react.
        """
        if wait and require_trigger:
            raise ValueError("a step that requires a trigger cannot be waited for here")
        now, dumps = get_dht_time(), self.serializer.dumps
        window = self.matchmaking_kwargs["min_matchmaking_time"]
        control = StepControl(
            scheduled_time=now + window if scheduled_time is None else scheduled_time,
            deadline=float("inf") if timeout is None else now + timeout,
            allow_retries=allow_retries,
            weight=float(self.mode.name != "AUX") if weight is None else weight,
            data_for_gather=dumps([self.bandwidth, self.mode.value, dumps(gather)]),
        )
        self._history.start(control, self._outer_pipe)
        if not require_trigger:
            control.allow_allreduce()
        return control.result() if wait else control

    def take_rounds(self) -> list[RoundResult]:
        """Return the rounds that ended since the last call, failed ones with their error."""
        return self._history.take()

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        """Return the metadata and the tensors of the first sound state; None without one.

        Raises:
            ValueError: ``wait`` is False.
            TimeoutError: It took longer than ``timeout``.
        """
        if not wait:
            raise ValueError("a state that is checked has to be waited for")
        future: MPFuture[Any] = MPFuture()
        request = {"future": future, "timeout": timeout}
        self._outer_pipe.send(("_load_state_from_peers", [], request))
        outcome: DownloadOutcome = future.result(timeout)
        self.downloaded_bytes += outcome.received_bytes
        self.refused_states += outcome.refused
        return outcome.state

    def shutdown(self) -> None:
        """Leave the swarm and end the averager's process."""
        super().shutdown()
        self.payload.close()

    def run(self) -> None:
        """Serve until shut down; executed in the averager's own process."""
        self.cancellations = Cancellations(self._stub_of)
        averager.Matchmaking = LiveMatchmaking
        averager.AllReduceRunner = MeasuredAllReduce
        self.matchmaking_kwargs.update(groups=self.groups, announce=self.rounds.announced)
        install.install()
        # Group ids and orders come from this generator. Peers that seed alike for the sake of
        # training would draw the same ids, and one group's late parts would fit another.
        random.seed()
        gc.freeze()  # else the collector unshares all the memory that came with the fork
        super().run()

    async def _set_members(self, members: Sequence[Member], lost: frozenset[bytes]) -> None:
        self._matchmaking.set_members(members, self._allreduce_timeout)
        await self.groups.set_absent(lost)

    async def _shutdown(self, timeout: float | None) -> None:
        """End every step, then wait until the DHT has read all messages of this process."""
        if self._declaring is not None:
            self._declaring.cancel()  # it sends a message on each change of the shared state
        self._steps.cancel()
        self.groups.cancel()
        await self._steps.end()
        self.groups.running.clear()
        with contextlib.suppress(Exception):  # held from here on: no search begins any more
            lock = self._matchmaking.lock_looking_for_group
            await asyncio.wait_for(lock.acquire(), STEP_PATIENCE)
        try:
            await super()._shutdown(timeout)
        finally:
            await flush(self.dht)
            await self._p2p.shutdown()  # removes this process's socket file

    async def _step(self, *, step: StepControl, future_for_init: MPFuture) -> None:
        with self._steps.running(step) as trace:
            try:
                with contextlib.suppress(*ENDED):
                    await super()._step(step=step, future_for_init=future_for_init)
            finally:
                round_ = round_of(step)
                if round_ is not None:
                    self._matchmaking.group_formation.leave_behind(round_)
                for group_id in trace.groups:
                    self.groups.close(group_id)
                if not step.cancelled():
                    self.rounds.end_step(trace)

    def _register_allreduce_group(self, group_info: GroupInfo) -> AbstractContextManager[None]:
        return self.rounds.opened(group_info)

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **options: Any
    ) -> RoundResult:
        options.update(min_vector_size=min_vector_size, timeout=self._allreduce_timeout)
        return await self.rounds.run(self, group_info, TRACE.get() or StepTrace(), **options)

    def abandon(self, group: GroupInfo) -> None:
        """Announce to a group that no more parts come from this peer."""
        others = [peer for peer in group.peer_ids if peer != self.peer_id]
        self.cancellations.send(others, self.groups.unfinished(group.group_id))

    async def run_allreduce(
        self, tensors: Sequence[torch.Tensor], group: GroupInfo, key: bytes, **options: Any
    ) -> None:
        """Average tensors in place in the all-reduce with this id."""
        await self._run_allreduce_inplace_(tensors, group, key, **options)

    async def _run_allreduce_inplace_(
        self, tensors: Any, group_info: GroupInfo, group_id: bytes | None = None, **options: Any
    ) -> None:
        """Run one all-reduce without the peers that were lost while the group formed.

        Such a peer may be back without this one knowing, so it gets a cancellation message. An
        excluded peer gets all of the average, or keeps its tensors.
        """
        key = group_info.group_id if group_id is None else group_id
        absent = self.groups.absent
        options["absent"] = absent
        self.cancellations.send([p for p in group_info.peer_ids if p.to_bytes() in absent], [key])
        run = super()._run_allreduce_inplace_
        if self.peer_id not in options.get("excluded", ()):
            await run(tensors, group_info, key, **options)
            return
        async with blank_copies(tensors) as blank:
            await run(blank, group_info, key, **options)
            if not self.groups.running[key].result().got_everything:
                raise AllreduceException("an excluded peer got a part of the average only")

    async def _declare_for_download_periodically(self) -> None:
        self._declaring = asyncio.current_task()
        await declare_state(
            self.dht,
            self._sharing_key,
            lambda: self.state_sharing_priority if self.allow_state_sharing else None,
            self._state_updated,
            self.declare_state_period,
        )

    @property
    def _sharing_key(self) -> str:
        return sharing_key(self._matchmaking.group_key_manager.prefix)

    async def _load_state_from_peers(self, future: MPFuture, timeout: float | None = None) -> None:
        patience = float(self.request_timeout)
        if timeout is not None:
            patience = min(timeout, float(self.next_chunk_timeout or patience))
        alive = self._matchmaking.group_formation.known()
        sources = SharedStates(self.dht, self._sharing_key, self._stub_of, alive, patience)
        download = StateDownload(sources, self._averaged_tensors)
        try:
            await download.run()
        finally:
            if not future.done():
                future.set_result(download.outcome())

    def _stub_of(self, peer: PeerID) -> DownloadStub:
        return self.get_stub(self._p2p, peer, namespace=self.prefix)

    @classmethod
    def get_stub(cls, p2p: P2P, peer: PeerID, *, namespace: str | None = None) -> DownloadStub:
        """Return the remote side of a peer."""
        return DownloadStub(super().get_stub(p2p, peer, namespace=namespace))

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Lead a peer as hivemind does, and keep the stream open until the peer closes it."""
        async with contextlib.aclosing(super().rpc_join_group(request, context)) as messages:
            async for message in messages:
                yield message
        await stay_open(PATIENCE)

    async def rpc_download_state(
        self, _request: averaging_pb2.DownloadRequest, _context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Send the state as hivemind does, then an empty message that marks it as complete."""
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
        """Pass a group member's parts to the all-reduce they belong to, once it runs here."""
        request = await anext(stream)
        patience = self.allreduce_kwargs["sender_timeout"]
        runner = await self.groups.runner(request.group_id, patience)
        if runner is None:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            return
        answers: Any = runner.rpc_aggregate_part(achain(as_aiter(request), stream), context)
        async with contextlib.aclosing(answers):
            async for message in answers:
                yield message
