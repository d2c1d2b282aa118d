"""Rounds of an averager: outlier filter, payload policy and measurement, one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.compression import CompressionBase, NoCompression
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.asyncio import enter_asynchronously

from rayhive.averaging.allreduce_groups import AllReduceGroups, allreduce_id
from rayhive.averaging.gradient_extras import WithExtras
from rayhive.averaging.group_formation import DifferentTensors, NoOtherPeers, RoundIsOver
from rayhive.averaging.member_data import MemberData
from rayhive.averaging.outlier_filter import OutlierFilter, Refusal
from rayhive.averaging.payload_policy import STALE_WEIGHT, GroupRound, PayloadPolicy
from rayhive.averaging.preparation import Preparation
from rayhive.averaging.round_filter import (
    AverageNotFinite,
    ExcludedRoundFailed,
    announced,
    are_finite,
    check_finite,
    refusal_records,
    separated,
)
from rayhive.averaging.round_result import RoundResult
from rayhive.averaging.steps import TRACE, StepTrace
from rayhive.averaging.streams import Cancellations
from rayhive.averaging.timeouts import while_it_moves
from rayhive.compression.partition import PARTITION_VERSION
from rayhive.compression.shares import reducer_shares, worthwhile
from rayhive.spec import Aggregation

#: Errors that end a step without a retry; the trainer gets them from the step.
ENDED = (NoOtherPeers, RoundIsOver, DifferentTensors, AverageNotFinite, ExcludedRoundFailed)
#: Longest wait for replies that are still leaving when this peer's part of a round is over [s].
DRAIN_PATIENCE = 2.0

#: Weight of a peer in a round, from the weight of its step, its id and the gathered data by peer.
Weighting = Callable[[float, PeerID, Mapping[PeerID, Any]], float]


def step_weight(weight: float, own: PeerID, gathered: Mapping[PeerID, Any]) -> float:
    """Return the weight of the step, whatever the group gathered."""
    return weight


class RoundHost(Protocol):
    """The averager whose rounds a pipeline runs.

    Attributes:
        mode: Whether it is a node, a client or an auxiliary peer.
        cancellations: Sender of cancellation messages.
        lock_averaged_tensors: Lock of the averaged tensors, shared with the trainer.
    """

    mode: AveragingMode
    cancellations: Cancellations
    lock_averaged_tensors: Any

    @property
    def peer_id(self) -> PeerID:
        """The peer itself."""

    def get_tensors(self) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """Lock the averaged tensors and return them."""

    async def run_allreduce(
        self, tensors: Sequence[torch.Tensor], group: GroupInfo, key: bytes, **options: Any
    ) -> None:
        """Average tensors in place in the all-reduce with this id."""


@dataclass
class RoundPipeline:
    """Runs the rounds of one averager, in its process.

    Attributes:
        tensors: The averaged tensors.
        statistics: Whether each of them is a statistic of the optimizer; empty if none is. The
            size of a statistic says nothing about the peer: only values that are not finite count.
        payload: Payload policy.
        outlier_filter: Rule and memory of the outlier filter.
        groups: All-reduces of the averager.
        aggregation: Aggregation rule of this peer as a reducer.
        weighting: Weight of this peer in a round.
        extras: Number of the last tensors, which enter as :class:`WithExtras` says. Of them as of
            statistics, only values that are not finite count.
    """

    tensors: Sequence[torch.Tensor]
    statistics: Sequence[bool]
    payload: PayloadPolicy
    outlier_filter: OutlierFilter
    groups: AllReduceGroups
    aggregation: Aggregation
    weighting: Weighting
    extras: int = 0
    # Cost of attempts that failed since the last result.
    _failed_searches: int = 0
    _failed_bytes: int = 0

    def __post_init__(self) -> None:
        if self.extras:
            self.payload = WithExtras(self.payload, self.tensors[-self.extras :])
            self.statistics = [False] * (len(self.tensors) - self.extras) + [True] * self.extras

    async def announced(self, data_for_gather: bytes) -> bytes:
        """Return the data that a step gathers, extended by this peer's announcement."""
        judged, others = self.tensors, []
        if any(self.statistics):
            paired = list(zip(self.tensors, self.statistics, strict=True))
            judged = [tensor for tensor, statistic in paired if not statistic]
            others = [tensor for tensor, statistic in paired if statistic]
        return await announced(
            self.outlier_filter, data_for_gather, judged if are_finite(others) else self.tensors
        )

    def prepare(self, host: RoundHost) -> None:
        """Let the payload policy work on the round of the current step while it has no group."""
        trace = TRACE.get()
        if trace is None or trace.step is None:
            return
        step = trace.step

        async def work() -> None:
            if host.lock_averaged_tensors.acquire(block=False):  # else a former round still runs
                try:
                    await self.payload.prepare(self.tensors, step.weight, step)
                finally:
                    host.lock_averaged_tensors.release()

        trace.preparation = Preparation(work)

    def opened(self, group_info: GroupInfo) -> AbstractContextManager[None]:
        """Accept parts of a group's all-reduces as long as the context is active."""
        phases = self.payload.phases(_gathered(group_info))
        return self.groups.opened(group_info.group_id, phases)

    def end_step(self, trace: StepTrace) -> None:
        """Close the groups of a step; note its cost, for the next result to report."""
        for group_id in trace.groups:
            self.groups.close(group_id)
        if trace.preparation is not None:
            trace.preparation.drop()
        if trace.step is not None and trace.step.cancelled():
            return
        self._failed_searches += len(trace.searches)
        self._failed_bytes += trace.wasted_bytes

    async def run(
        self,
        host: RoundHost,
        group_info: GroupInfo,
        trace: StepTrace,
        *,
        weight: float = 1.0,
        min_vector_size: int = 0,
        timeout: float | None = None,
        **options: Any,
    ) -> RoundResult:
        """Average with the members of a group whose tensors pass the outlier filter.

        Args:
            host: The averager.
            group_info: The group, with announcements in the gathered data.
            trace: Record of the step that the round belongs to.
            weight: Weight of the step.
            min_vector_size: As hivemind's.
            timeout: Longest time without a part that arrives or leaves [s].
            options: Arguments of the all-reduces.

        Raises:
            NoOtherPeers: No member's tensors pass.
            AverageNotFinite: The average is not finite all the same.
            ExcludedRoundFailed: This peer's tensors are refused, and it did not get the average.
            MatchmakingException: The round failed; the caller may try again.
        """
        group, announcements = separated(group_info)
        gathered = _gathered(group)
        refused = self.outlier_filter.judge(announcements)
        trace.excluded |= host.peer_id in refused
        if all(peer in refused for peer in _contributors(group)):
            raise NoOtherPeers("no member of the group has finite tensors to average")
        weight = 0.0 if trace.excluded else self.weighting(weight, host.peer_id, gathered)
        auxiliary = host.mode == AveragingMode.AUX
        if self.extras and not (trace.excluded or auxiliary):
            weight = max(weight, STALE_WEIGHT)  # an average over no samples would be 0
        options.update(weight=weight, excluded=frozenset(refused), aggregation=self.aggregation)
        began = time.monotonic()
        try:
            options.update(await self._division(group, min_vector_size))
            allreduce = partial(self._allreduce, host, group, trace, options)
            # Members of hivemind cut tensors by the codec of the group.
            plain = "shares" in options and type(options["compression"]) is NoCompression
            round_ = GroupRound(allreduce, gathered, weight, auxiliary, trace.step, plain)
            if trace.preparation is not None:
                await trace.preparation.ended()
            async with self._locked(host) as tensors:
                averaging = self.payload.average(tensors, round_)
                await while_it_moves(averaging, partial(self.groups.moved, group.group_id), timeout)
        except BaseException as error:
            runners = self.groups.started(group.group_id).values()
            trace.wasted_bytes += sum(runner.sent_bytes for runner in runners)
            others = [peer for peer in group.peer_ids if peer != host.peer_id]
            host.cancellations.send(others, self.groups.unfinished(group.group_id))
            failed = MatchmakingException(f"the averaging round failed: {error!r}")
            if trace.excluded:
                raise ExcludedRoundFailed(repr(failed), refusal_records(refused)) from error
            raise failed from error
        result = await self._measured(group, gathered, trace, began)
        self.outlier_filter.learn(announcements, host.peer_id)
        runners = self.groups.started(group.group_id).values()
        late = {peer for runner in runners for peer in runner.refused()}
        refused |= dict.fromkeys(late - refused.keys(), Refusal("not_finite"))
        result.rejected, result.excluded = refusal_records(refused), trace.excluded
        check_finite(self.tensors)
        return result

    @asynccontextmanager
    async def _locked(self, host: RoundHost) -> AsyncIterator[Sequence[torch.Tensor]]:
        """Lock the averaged tensors; wait in a thread if the trainer holds the lock."""
        if host.lock_averaged_tensors.acquire(block=False):
            try:
                yield self.tensors
            finally:
                host.lock_averaged_tensors.release()
        else:
            async with enter_asynchronously(host.get_tensors()) as tensors:
                yield tensors

    async def _division(self, group: GroupInfo, min_vector_size: int) -> dict[str, Any]:
        """Return the options of an all-reduce about the share that each member reduces.

        Members of hivemind can use hivemind's division only, and with them the whole group.
        """
        members = [MemberData.loads(data) for data in group.gathered]
        rates = [member.rate for member in members]
        size = sum(tensor.numel() for tensor in self.tensors)
        if all(member.partition == PARTITION_VERSION for member in members):
            shares = worthwhile(reducer_shares(rates), size, min_vector_size)
            return {"shares": shares, "peer_fractions": tuple(map(float, shares))}
        loop = asyncio.get_running_loop()
        fractions = await loop.run_in_executor(
            None, load_balance_peers, size, rates, min_vector_size
        )
        return {"peer_fractions": fractions}

    async def _allreduce(
        self,
        host: RoundHost,
        group: GroupInfo,
        trace: StepTrace,
        options: dict[str, Any],
        phase: str,
        tensors: Sequence[torch.Tensor],
        owed: Sequence[torch.Tensor] | None = None,
        exact: int = 0,
        codec: CompressionBase | None = None,
    ) -> float:
        """Average tensors in one phase; return the fraction of the averaging that happened."""
        key = allreduce_id(group.group_id, phase)
        if codec is not None:
            options = {**options, "compression": codec}
        try:
            await host.run_allreduce(tensors, group, key, owed=owed, exact=exact, **options)
        except BaseException:
            runner = self.groups.started(group.group_id).get(phase)
            in_place = {id(tensor) for tensor in tensors} & {id(own) for own in self.tensors}
            if runner is not None and in_place:
                trace.replaced = max(trace.replaced, runner.replaced())
            raise
        runner = self.groups.started(group.group_id).get(phase)
        return 1.0 if runner is None else runner.fraction()

    async def _measured(
        self,
        group: GroupInfo,
        gathered: dict[PeerID, Any],
        trace: StepTrace,
        began: float,
    ) -> RoundResult:
        """Return the result of a round that succeeded, once its replies have left."""
        ended = time.monotonic()
        phases = self.groups.started(group.group_id)
        drained = [await runner.drain(DRAIN_PATIENCE) for runner in phases.values()]
        own = 1 - trace.replaced  # what this peer sent in place of its own tensors does not count
        records = [runner.record(name) for name, runner in phases.items()]
        for record in records:
            record["fraction"] = min(record["fraction"], own)
        result = RoundResult(
            gathered,
            phases=tuple(records),
            wasted_bytes=self._failed_bytes + trace.wasted_bytes,
            banned=tuple(sorted({peer for runner in phases.values() for peer in runner.banned()})),
            failures=tuple(text for runner in phases.values() for text in runner.failures),
            matchmaking_s=trace.waited(),
            allreduce_s=ended - began,
            attempts=max(1, self._failed_searches + len(trace.searches)),
            counts_complete=all(drained),
        )
        # Reported once; further cost of this step is added when it ends.
        self._failed_searches = self._failed_bytes = trace.wasted_bytes = 0
        trace.searches.clear()
        return result


def _contributors(group: GroupInfo) -> list[PeerID]:
    """Return the members of a group that contribute tensors, and do not only reduce."""
    modes = (MemberData.loads(data).mode for data in group.gathered)
    members = zip(group.peer_ids, modes, strict=True)
    return [peer for peer, mode in members if mode != AveragingMode.AUX.value]


def _gathered(group_info: GroupInfo) -> dict[PeerID, Any]:
    """Return the data that each member of a group gathered."""
    return {
        peer: MSGPackSerializer.loads(MemberData.loads(data).content)
        for peer, data in zip(group_info.peer_ids, group_info.gathered, strict=True)
    }
