"""Averager that composes rayhive's group formation, all-reduce, outlier filter and payload policy.

hivemind runs an averager in a process that is forked from the trainer's. Only there, rayhive
replaces hivemind's matchmaking and table of codecs; in the trainer's, the server of states.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Any, AsyncIterator, ClassVar  # noqa: UP035 - hivemind wants typing's

import torch
from hivemind.averaging import DecentralizedAverager, allreduce, averager
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_dht_time

from rayhive.averaging import transport
from rayhive.averaging.allreduce import MeasuredAllReduce
from rayhive.averaging.allreduce_groups import AllReduceGroups
from rayhive.averaging.matchmaking import LiveMatchmaking
from rayhive.averaging.member_data import MemberData
from rayhive.averaging.member_news import MemberNews
from rayhive.averaging.outlier_filter import OutlierFilter
from rayhive.averaging.parts import as_protobuf
from rayhive.averaging.payload_policy import DensePayload, PayloadPolicy
from rayhive.averaging.round_filter import replaced_tensors
from rayhive.averaging.round_pipeline import ENDED, RoundPipeline, Weighting, step_weight
from rayhive.averaging.round_result import RoundResult
from rayhive.averaging.sharing_priority import PRIORITY, announced
from rayhive.averaging.state_download import (
    DownloadOutcome,
    LatestDownload,
    OwnState,
    SharedStates,
    StateDownload,
    declare_state,
    patience_of,
)
from rayhive.averaging.step_pipes import LockedPipe, RequestPipe, serve_states
from rayhive.averaging.step_requests import StepRequests
from rayhive.averaging.steps import STEP_PATIENCE, TRACE, RunningSteps, StepTrace, flush
from rayhive.averaging.streams import PATIENCE, Cancellations, DownloadStub, completed, noted
from rayhive.averaging.tensor_memory import drop_inherited
from rayhive.averaging.tensor_summary import floats, norm_of
from rayhive.averaging.timeouts import hivemind_timeouts, in_time
from rayhive.compression.kernels import install
from rayhive.membership.peer_links import PeerLinks
from rayhive.membership.signs import SignsOfLife
from rayhive.membership.view import Member
from rayhive.spec import Aggregation, OutlierFilterRule

#: Makes the payload policy of an averager from its averaged tensors.
PayloadFactory = Callable[[Sequence[torch.Tensor]], PayloadPolicy]


class MeasuredAverager(DecentralizedAverager):
    """Averager whose rounds are measured, filtered, and formed by the live peers.

    It comes last among the bases of an averager, behind hivemind's own class.
    ``StepControl.result()`` is a :class:`RoundResult`. :func:`hivemind_timeouts` sets the timeouts.
    ``outlier_filter``, ``aggregation`` and ``differences`` are the same for all peers of a swarm.

    Args:
        start: Start the averager's process at once.
        payload: Makes the payload policy; None averages the tensors themselves.
        outlier_filter: Rule of the outlier filter, see :mod:`rayhive.averaging.outlier_filter`.
        sketches: Whether the direction of the tensors is meaningful.
        aggregation: Aggregation rule of reducers.
        differences: Whether reducers answer with differences, see :class:`MeasuredAllReduce`.
        weighting: Weight of this peer in a round.
        extras: Number of the last tensors, which enter as :class:`WithExtras` says.
        trusted_network: Whether links to other peers may do without encryption.
        trainer_tensors: Returns tensors that only the trainer's process reads, to save memory.
        min_matchmaking_time: Longest wait for a group [s].
        allreduce_timeout: Longest time of a round in which no part arrives or leaves [s].
        kwargs: As hivemind's. ``target_group_size`` counts until :meth:`set_members` is called.

    Attributes:
        payload: The payload policy.
        groups: All-reduces of this averager, in its process.
        cancellations: Sender of cancellation messages, in its process.
        signs: Signs of life of peers with which its process exchanges bulk data.
        refused_states: Refused states, as in :class:`DownloadOutcome`, since it was last emptied.
        summed_steps: Steps of an optimizer that the tensors of the next round sum up.
        downloaded_bytes: Bytes received of states so far, refused ones included.
    """

    #: Class name in the names of the RPCs; peers with different names never find each other.
    wire_name: ClassVar[str]
    state_sharing_priority = PRIORITY
    cancellations: Cancellations
    _matchmaking: LiveMatchmaking

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A class would inherit the stubs that hivemind made for its parent, with its RPC names.
        cls._rpc_handlers = cls._stub_type = None

    def __init__(
        self,
        *,
        start: bool,
        payload: PayloadFactory | None = None,
        outlier_filter: OutlierFilterRule = "norm",
        sketches: bool = True,
        aggregation: Aggregation = "mean",
        differences: bool = False,
        weighting: Weighting = step_weight,
        extras: int = 0,
        trusted_network: bool = False,
        trainer_tensors: Callable[[], Iterable[torch.Tensor]] = tuple,
        min_matchmaking_time: float = 5.0,
        allreduce_timeout: float | None = None,
        **kwargs: Any,
    ) -> None:
        timeouts = hivemind_timeouts(min_matchmaking_time, allreduce_timeout, kwargs)
        kwargs.update(timeouts, allreduce_timeout=allreduce_timeout)
        self.refused_states: list[dict[str, Any]] = []
        self.downloaded_bytes, self.summed_steps, self.signs = 0, 1, SignsOfLife()
        self._differences, self._trainer_tensors = differences, trainer_tensors
        self._standstill, self._downloads = allreduce_timeout, LatestDownload()
        self.groups, self._steps = AllReduceGroups(), RunningSteps()  # for its process only
        self._declaring: asyncio.Task[None] | None = None
        averager._background_thread_fetch_current_state = serve_states
        super().__init__(start=False, min_matchmaking_time=min_matchmaking_time, **kwargs)
        self._running_groups = self.groups.running
        how = (not self.client_mode, trusted_network, self.signs, self.groups.set_parted)
        self._links = PeerLinks(self._get_handle_name(self.prefix, "link"), *how)
        self._outer_pipe: Any = LockedPipe(self._outer_pipe)
        self._news = MemberNews(self._outer_pipe)
        self._requests = StepRequests(self._outer_pipe, self.signs.newest)
        self._signal_step = self._requests.signal
        self.payload = DensePayload() if payload is None else payload(self._averaged_tensors)
        rule = OutlierFilter(outlier_filter, sketches=sketches)
        stats = [info.role.name != "PARAMETER" for info in self.tensor_infos or ()]
        options = (self.groups, aggregation, weighting, extras)
        self.rounds = RoundPipeline(self._averaged_tensors, stats, self.payload, rule, *options)
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
        """Set the peers that take part in the run, see :class:`MemberNews`.

        Any thread may call it at any time. It does nothing if the averager's process is not alive.

        Args:
            members: The peers, oldest first.
            lost: Ids of peers that were lost without a word. No all-reduce waits for them. A peer
                that left with a message finishes its rounds, and is awaited until its link ends.
        """
        with suppress(OSError, ValueError, AssertionError):
            if self.pid is not None and self.is_alive():
                self._news.set(tuple(members), lost)

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
        """Run a step as hivemind does; the result of an averager that does not react is an error.

        Raises:
            ValueError: ``wait`` and ``require_trigger`` are both set.
            TimeoutError: The averager does not react, and ``wait`` is set.
        """
        if wait and require_trigger:
            raise ValueError("a step that requires a trigger cannot be waited for here")
        now, dumps = get_dht_time(), self.serializer.dumps
        window = self.matchmaking_kwargs["min_matchmaking_time"]
        member = MemberData(self.bandwidth, self.mode.value, dumps(gather), steps=self.summed_steps)
        control = self._news.begin(
            self._requests.request,
            scheduled_time=now + window if scheduled_time is None else scheduled_time,
            deadline=float("inf") if timeout is None else now + timeout,
            allow_retries=allow_retries,
            weight=float(self.mode.name != "AUX") if weight is None else weight,
            gather=member.dumps(),
        )
        if not require_trigger:
            control.allow_allreduce()
        return control.result() if wait else control

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        """Return the metadata and the tensors of the first sound state; None without one.

        Raises:
            ValueError: ``wait`` is False.
            TimeoutError: It took longer than ``timeout``.
        """
        if not wait:
            raise ValueError("a state that is checked has to be waited for")
        future: MPFuture[Any] = MPFuture()
        request = {"future": future, "timeout": timeout, "own": self.own_state()}
        self._outer_pipe.send(("_load_state_from_peers", [], request))
        outcome: DownloadOutcome = future.result(timeout)
        self.downloaded_bytes += outcome.received_bytes
        self.refused_states += outcome.refused
        return outcome.state

    def own_state(self) -> OwnState:
        """Return the norm of this peer's tensors, for comparison with another peer's state."""
        return OwnState(norm_of(floats(self._averaged_tensors)))

    def shutdown(self) -> None:
        """Leave the swarm and end the averager's process."""
        super().shutdown()
        self.payload.close()

    def run(self) -> None:
        """Serve until shut down; executed in the averager's own process."""
        self.cancellations = Cancellations(self._stub_of)
        averager.Matchmaking, allreduce.aiter_with_timeout = LiveMatchmaking, in_time
        self._inner_pipe: Any = RequestPipe(self._inner_pipe, self)
        own: dict[str, Any] = {"announce": self.rounds.announced, "link_to": self._links.get}
        own["prepare"] = lambda: self.rounds.prepare(self)
        self.matchmaking_kwargs.update(groups=self.groups, on_made=self._inner_pipe.open, **own)
        install.install()
        self._allreduce_timeout = None  # hivemind's limits the whole round
        # Peers that seed alike for training would draw equal ids of groups, and mix late parts.
        random.seed()
        if os.getpid() != self._parent_pid:
            drop_inherited(self._trainer_tensors())
        gc.freeze()  # else the collector unshares all the memory that came with the fork
        super().run()

    async def add_p2p_handlers(self, p2p: P2P, *args: Any, **kwargs: Any) -> None:
        """Answer calls of other peers, through the daemon and over links."""
        await super().add_p2p_handlers(p2p, *args, **kwargs)
        handlers = transport.handlers(self.aggregate, self.lead, self.rpc_download_state)
        await self._links.open(p2p, handlers)

    async def _set_members(self, members: Sequence[Member], lost: frozenset[bytes]) -> None:
        self._matchmaking.set_members(members, self._standstill)
        if self.client_mode:  # it serves no calls; its links begin with the first members
            await self._links.open(self._p2p)
        await self.groups.set_absent(lost)
        self._links.set_members((member.peer_id for member in members), lost)
        await self.groups.set_parted(self._links.parted())

    async def _shutdown(self, timeout: float | None) -> None:
        """End every step, then wait until the DHT has read all messages of this process."""
        if self._declaring is not None:
            self._declaring.cancel()  # it sends a message on each change of the shared state
        self._steps.cancel()
        self.groups.cancel()
        await self._steps.end()
        self.groups.running.clear()
        with suppress(Exception):  # held from here on: no search begins any more
            lock = self._matchmaking.lock_looking_for_group
            await asyncio.wait_for(lock.acquire(), STEP_PATIENCE)
        try:
            await self._links.close(transport.UNHURRIED)
            await super()._shutdown(timeout)
        finally:
            await flush(self.dht)
            await self._p2p.shutdown()  # removes this process's socket file

    async def _take_step(self, *request: Any) -> None:
        with self._requests.taken(*request) as (step, attached), self._steps.running(step) as trace:
            try:
                with suppress(*ENDED):
                    await self._step(step=step, future_for_init=attached)
            finally:
                self._matchmaking.leave(step)
                self.rounds.end_step(trace)

    def _register_allreduce_group(self, group_info: GroupInfo) -> AbstractContextManager[None]:
        return self.rounds.opened(group_info)

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **options: Any
    ) -> RoundResult:
        options.update(min_vector_size=min_vector_size, timeout=self._standstill)
        return await self.rounds.run(self, group_info, TRACE.get() or StepTrace(), **options)

    async def run_allreduce(
        self, tensors: Sequence[torch.Tensor], group: GroupInfo, key: bytes, **options: Any
    ) -> None:
        """Average tensors in place in one all-reduce of a group.

        Peers that were lost while the group formed are left out. Such a peer may be back without
        this one knowing, so it gets a cancellation message. An excluded peer gets all of the
        average, or keeps its tensors. The options are those of :class:`MeasuredAllReduce`.
        """
        absent = options["absent"] = self.groups.absent
        self.cancellations.send([p for p in group.peer_ids if p.to_bytes() in absent], [key])
        if self.peer_id not in options.get("excluded", ()):
            await self._run_allreduce_inplace_(tensors, group, key, **options)
            return
        with replaced_tensors(tensors) as averages:
            await self._run_allreduce_inplace_(averages, group, key, **options)
            if not self.groups.running[key].result().got_everything:
                raise AllreduceException("an excluded peer got a part of the average only")

    async def _run_allreduce_inplace_(
        self, tensors: Any, group_info: GroupInfo, group_id: bytes | None = None, **options: Any
    ) -> None:
        """Run an all-reduce, and move each tensor to its average."""
        key = group_info.group_id if group_id is None else group_id
        runner = MeasuredAllReduce(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors,
            group_id=key,
            ordered_peer_ids=group_info.peer_ids,
            differences=self._differences,
            alpha=self._averaging_alpha,
            transport=transport.way(self._links, self._stub_of),
            **options,
        )
        await self.groups.begin(key, runner)
        async for _ in runner:
            self.last_updated = get_dht_time()

    async def _declare_for_download_periodically(self) -> None:
        if type(self).load_state_from_peers is MeasuredAverager.load_state_from_peers:
            return  # plain gradients: no peer loads them
        self._declaring = asyncio.current_task()
        key, changed, period = self._sharing_key, self._state_updated, self.declare_state_period
        await declare_state(self.dht, key, lambda: announced(self), changed, period)

    @property
    def _sharing_key(self) -> str:
        return f"{self._matchmaking.group_key_manager.prefix}.all_averagers"

    async def _load_state_from_peers(
        self, future: MPFuture, timeout: float | None = None, own: OwnState | None = None
    ) -> None:
        patience = patience_of(timeout, float(self.request_timeout), self.next_chunk_timeout)
        alive = self._matchmaking.group_formation.known()
        source = transport.states(self._links, self._stub_of)
        sources = SharedStates(self.dht, self._sharing_key, source, alive, patience)
        await self._downloads.run(StateDownload(sources, own or OwnState()).run_for(future))

    def _stub_of(self, peer: PeerID) -> DownloadStub:
        return self.get_stub(self._p2p, peer, namespace=self.prefix)

    @classmethod
    def get_stub(cls, p2p: P2P, peer: PeerID, *, namespace: str | None = None) -> DownloadStub:
        """Return the remote side of a peer."""
        return DownloadStub(super().get_stub(p2p, peer, namespace=namespace))

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """Lead a peer, and keep the stream of the daemon open until the peer closes it."""
        async with aclosing(self.lead(request, context)) as messages:
            async for message in messages:
                yield message
        await asyncio.sleep(PATIENCE)

    def lead(self, request: averaging_pb2.JoinRequest, context: Any) -> AsyncGenerator[Any, None]:
        """Answer a request to join a group, whichever way it comes."""
        return self._matchmaking.rpc_join_group(request, context)

    async def rpc_download_state(
        self, _request: averaging_pb2.DownloadRequest, _context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """Send the state as hivemind does, then an empty message that marks it as complete."""
        state = completed(super().rpc_download_state(_request, _context))
        async with aclosing(state) as messages:
            async for message in messages:
                yield message
                self._links.heard(_context.remote_id)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Answer a group member whose parts come through the daemon."""
        parts = noted(stream, lambda: self._links.heard(context.remote_id))
        async with aclosing(self.aggregate(parts, context)) as answers:
            async for message in as_protobuf(answers):
                yield message

    def aggregate(self, stream: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
        """Answer a group member's parts, whichever way they come."""
        return self.groups.aggregate(stream, context, self.allreduce_kwargs["sender_timeout"])
