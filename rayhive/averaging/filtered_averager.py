"""Corrupt tensors are refused before they reach another peer, and their sender is named.

Before a group averages, each member announces what it is about to send, as
:mod:`rayhive.averaging.outlier_filter` wants it. Announcements travel with what the group gathers
anyway, so all members reach the same verdict without another message. A refused peer reaches it,
too: it contributes nothing, with weight 0, and takes the average of the others.

This is for peers that are broken, not for liars. Against these a reducer looks at every part once
more (:mod:`rayhive.averaging.reducer`), and nobody hands on an average that is not finite.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, astuple
from statistics import fmean
from typing import Any, TypeVar

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.utils import MPFuture, MSGPackSerializer

from rayhive.averaging.excluded import ExcludedRoundFailed, blank_copies
from rayhive.averaging.group_formation import NoOtherPeers
from rayhive.averaging.matchmaking import TRACE, StepTrace
from rayhive.averaging.outlier_filter import Announcement, OutlierFilter, Refusal
from rayhive.averaging.powersgd_averager import STEP
from rayhive.averaging.round_result import RoundResult
from rayhive.spec import Aggregation, OutlierFilterRule

P = TypeVar("P", bound=Hashable)

#: From so many elements on, tensors are looked at in a thread and not in the event loop.
LARGE = 1_000_000
#: What who did nothing without the others counts for; not 0, should all have done nothing.
LEAST_ROUNDS = 1e-6
#: Weight of tensors that must not count; not 0, should all of a group have it.
STALE_WEIGHT = 1e-9
_KEY = "guard"


class AverageNotFinite(Exception):
    """A round came out with an average that is not finite, though nothing that went in was."""


def weights(told: Mapping[P, tuple[tuple[str, ...], int | None]]) -> dict[P, float]:
    """Return by how much each peer's parameters count, the most by 1.

    Those who were together have the same parameters, so each of them counts for its share of the
    rounds that they did. Those who have lost nobody count like the average of those who have.

    Args:
        told: For each peer, who was with it while others were lost, and the rounds that it did.
    """
    rounds: dict[tuple[str, ...], int] = {}
    for half, apart in told.values():
        if apart is not None:
            rounds[half] = max(rounds.get(half, 0), apart)
    if not rounds:
        return dict.fromkeys(told, 1.0)
    sizes = Counter(half for half, apart in told.values() if apart is not None)
    shares = {half: max(done, LEAST_ROUNDS) / sizes[half] for half, done in rounds.items()}
    usual = fmean(shares[half] for half, apart in told.values() if apart is not None)
    found = {p: usual if apart is None else shares[half] for p, (half, apart) in told.items()}
    return {peer: share / max(found.values()) for peer, share in found.items()}


class Filtered(DecentralizedAverager):
    """Mixin that stands before :class:`rayhive.averaging.averager.MeasuredAverager`.

    It acts in rounds that meet by :class:`rayhive.averaging.group_formation.GroupFormation`; a
    group
    whose members announce nothing averages as ever. ``rejected`` of the round's result says what
    was refused: a list of peers, reasons, norms and bounds.

    Args:
        args: As the averager's.
        outlier_filter: What is refused; the same for all peers of a swarm.
        aggregation: What a reducer makes of gradients; the same for all peers of a swarm.
        kwargs: As the averager's.
    """

    #: Whether the direction of the tensors means anything, and other rules than the mean do.
    gradients = True
    _matchmaking: Any

    def __init__(
        self,
        *args: Any,
        outlier_filter: OutlierFilterRule = "norm",
        aggregation: Aggregation = "mean",
        **kwargs: Any,
    ) -> None:
        # its memory lives in the averager's process
        self._filter = OutlierFilter(outlier_filter, sketches=self.gradients)
        self._aggregation: Aggregation = aggregation if self.gradients else "mean"
        super().__init__(*args, **kwargs)

    async def _step(self, *, step: StepControl, future_for_init: MPFuture) -> None:
        self._matchmaking.announce = self._with_announcement
        # the trainer has them from the step
        with contextlib.suppress(AverageNotFinite, ExcludedRoundFailed):
            await super()._step(step=step, future_for_init=future_for_init)

    async def _with_announcement(self, data_for_gather: bytes) -> bytes:
        """Return what a step gathers together with what this peer announces."""
        bandwidth, mode, gathered = self.serializer.loads(data_for_gather)
        tensors = floats(self._averaged_tensors)
        if sum(tensor.numel() for tensor in tensors) < LARGE:
            said = self._filter.announce(tensors)
        else:
            loop = asyncio.get_running_loop()
            said = await loop.run_in_executor(None, self._filter.announce, tensors)
        return bytes(self.serializer.dumps([bandwidth, mode, _attached(gathered, said)]))

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> RoundResult:
        """Average with those whose tensors can be right.

        Raises:
            NoOtherPeers: There is nobody in the group whose tensors are.
            AverageNotFinite: What came out is not finite all the same.
            ExcludedRoundFailed: This peer's tensors are refused, and it did not get the average.
        """
        group_info, said = self._detached(group_info)
        refused = self._filter.judge(said)
        trace = TRACE.get() or StepTrace()
        trace.excluded |= self.peer_id in refused
        if len(refused) == len(group_info.peer_ids):
            raise NoOtherPeers("what this group was about to average is not finite")
        if trace.excluded:
            kwargs["weight"] = 0.0
        try:
            result: RoundResult = await super()._aggregate_with_group(
                group_info,
                min_vector_size,
                excluded=frozenset(refused),
                aggregation=self._aggregation,
                **kwargs,
            )
        except Exception as error:
            if trace.excluded:
                raise ExcludedRoundFailed(repr(error), _told(refused)) from error
            raise
        self._filter.learn(said, self.peer_id)
        reducers: dict[Any, str] = {}
        for runner in self._runners(group_info.group_id).values():
            reducers.update(runner.refused())
        late = {peer: Refusal(reason) for peer, reason in reducers.items() if peer not in refused}
        result.rejected = _told(refused | late)
        result.excluded = trace.excluded
        if not math.isfinite(sum_of(floats(self._averaged_tensors))):
            raise AverageNotFinite("the average that came back is not finite")
        return result

    async def _run_allreduce_inplace_(
        self, tensors: Any, group_info: GroupInfo, group_id: bytes | None = None, **options: Any
    ) -> None:
        """Run one all-reduce; an excluded peer gets all of the average, or keeps its tensors."""
        run = super()._run_allreduce_inplace_
        if self.peer_id not in options.get("excluded", ()):
            await run(tensors, group_info, group_id, **options)
            return
        async with blank_copies(tensors) as blank:
            await run(blank, group_info, group_id, **options)
            runner = self._running_groups[group_id or group_info.group_id].result()
            if runner.tensor_part_container.failed_size:
                raise AllreduceException("an excluded peer got a part of the average only")

    def _detached(self, group_info: GroupInfo) -> tuple[GroupInfo, dict[PeerID, Announcement]]:
        """Return the group as without announcements, and these."""
        gathered, said = [], {}
        for peer, data in zip(group_info.peer_ids, group_info.gathered, strict=True):
            bandwidth, mode, content = self.serializer.loads(data)
            content, announcement = detached(content)
            gathered.append(self.serializer.dumps([bandwidth, mode, content]))
            if announcement is not None:
                said[peer] = announcement
        return GroupInfo(group_info.group_id, group_info.peer_ids, tuple(gathered)), said


class FilteredState(Filtered):
    """The same for parameters, weighted by what peers did while they had lost each other.

    They gather the round, who was with them, and how many rounds they did so; see :func:`weights`.
    """

    gradients = False

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> RoundResult:
        clean, _ = self._detached(group_info)
        told = {}
        for peer, data in zip(clean.peer_ids, clean.gathered, strict=True):
            content = self.serializer.loads(self.serializer.loads(data)[2])
            if isinstance(content, (list, tuple)) and len(content) == 3:
                told[peer] = (tuple(content[1]), content[2])
        if self.peer_id in told and kwargs.get("weight"):
            kwargs["weight"] *= weights(told)[self.peer_id]
        return await super()._aggregate_with_group(group_info, min_vector_size, **kwargs)


class FilteredFactors(Filtered):
    """The same for an averager with error feedback."""

    @property
    def _contributes(self) -> bool:
        """Whether its tensors entered the average."""
        trace, step = TRACE.get(), STEP.get()
        excluded = trace is not None and trace.excluded
        return not excluded and (step is None or step.weight > STALE_WEIGHT)


def _told(refused: Mapping[PeerID, Refusal]) -> tuple[dict[str, Any], ...]:
    return tuple({"offender": str(peer), **asdict(why)} for peer, why in refused.items())


def floats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that can be corrupt in the ways that are looked for here, as they are."""
    return [tensor.detach() for tensor in tensors if tensor.is_floating_point()]


def sum_of(tensors: Sequence[torch.Tensor]) -> float:
    """Return the sum of all elements, which is finite only if all of them are."""
    return sum(float(tensor.sum(dtype=torch.float32)) for tensor in tensors)


def _attached(gathered: bytes, said: Announcement) -> bytes:
    """Return serialized data that is gathered with an announcement behind it."""
    content = MSGPackSerializer.loads(gathered)
    items = list(content) if isinstance(content, (list, tuple)) else [content]
    alone = not isinstance(content, (list, tuple))
    told = list(astuple(said))
    return bytes(MSGPackSerializer.dumps([*items, {_KEY: told, "alone": alone}]))


def detached(gathered: bytes) -> tuple[bytes, Announcement | None]:
    """Undo what :func:`_attached` did; data without an announcement stays as it is."""
    content = MSGPackSerializer.loads(gathered)
    last = content[-1] if isinstance(content, (list, tuple)) and content else None
    if not isinstance(last, dict) or _KEY not in last:
        return gathered, None
    rest = list(content[:-1])
    return MSGPackSerializer.dumps(rest[0] if last["alone"] else rest), Announcement(*last[_KEY])
