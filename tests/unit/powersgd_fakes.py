"""PowerSGD peers in one process: real averagers, whose all-reduces are done in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.utils import MSGPackSerializer

from rayhive.averaging.powersgd_averager import STEP, TransactionalPowerSGD
from tests.unit.compression_fakes import unstarted


class Room:
    """Where the all-reduces of a group meet.

    Args:
        size: Peers of the group.
        trouble: What happens, by peer and phase: ``before`` and ``after`` fail before and after
            the tensors were averaged, ``hang`` never ends, ``partial`` keeps every second tensor
            from being averaged.
        weights: Weights of the peers in the averages, by default equal.
        codec: What encoding and decoding make of a tensor on its way, both there and back.

    Attributes:
        given: What entered the average of a phase, by peer.
    """

    def __init__(
        self,
        size: int,
        trouble: Mapping[tuple[int, str], str] | None = None,
        weights: Sequence[float] | None = None,
        codec: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    ) -> None:
        self.codec = codec
        self.trouble = dict(trouble or {})
        self.weights = [1.0] * size if weights is None else list(weights)
        self.size, self._live = size, set(range(size))
        self.given: dict[str, dict[int, Sequence[torch.Tensor]]] = {}
        self._means: dict[str, asyncio.Future[list[torch.Tensor]]] = {}
        self.hanging = asyncio.Event()
        self.phases: list[str] = []
        self.succeeded: list[bool] = []
        self.sent: list[tuple[str, tuple[int, ...]]] = []

    def leave(self, peer: int) -> None:
        self._live.discard(peer)
        for phase in self.given:
            self._average(phase)

    def _average(self, phase: str) -> None:
        here, mean = self.given[phase], self._means[phase]
        if self._live <= set(here) and here and not mean.done():
            mean.set_result(self.mean(phase))

    def mean(self, phase: str) -> list[torch.Tensor]:
        """Return the weighted means of what a phase was given; zeros without any weight."""
        given = self.given[phase]
        weights = torch.tensor([float(self.weights[peer]) for peer in given])
        weights /= weights.sum() or 1.0
        columns = [torch.stack(column) for column in zip(*given.values(), strict=True)]
        return [torch.tensordot(weights.to(column.dtype), column, 1) for column in columns]

    async def allreduce(self, peer: int, phase: str, tensors: Sequence[torch.Tensor]) -> float:
        """Average in place among all who are still there; return the fraction."""
        what = self.trouble.get((peer, phase))
        if what == "before":
            raise RuntimeError("the network is gone")
        if phase not in self.given:
            self.phases.append(phase)
            self.sent.append((phase, tuple(tensor.numel() for tensor in tensors)))
            self.given[phase] = {}
            self._means[phase] = asyncio.get_running_loop().create_future()
        self.given[phase][peer] = [self.codec(tensor) for tensor in tensors]
        self._average(phase)
        if what == "hang":
            self.hanging.set()
            await asyncio.Event().wait()
        for index, (tensor, mean) in enumerate(zip(tensors, await self._means[phase], strict=True)):
            assert tensor.is_contiguous()
            if what != "partial" or index % 2:
                tensor.copy_(self.codec(mean))
        if what == "after":
            raise RuntimeError("the network is gone")
        everybody = len(self.given[phase]) == self.size
        return 1.0 if everybody and what != "partial" else 0.5


class InMemory(TransactionalPowerSGD):
    """A peer whose all-reduces happen in a :class:`Room`."""

    room: Room
    number = 0

    async def _run_allreduce_inplace_(
        self, tensors: Any, group_info: Any, group_id: bytes, **_: Any
    ) -> None:
        phase = group_id.removeprefix(group_info.group_id).decode()
        fraction = await self.room.allreduce(self.number, phase, tensors)
        runner = SimpleNamespace(fraction=lambda: fraction)
        self._running_groups[group_id].set_result(runner)


def peers(count: int, shapes: Sequence[tuple[int, ...]], **options: Any) -> list[InMemory]:
    made = [unstarted(InMemory, shapes, **options) for _ in range(count)]
    for number, averager in enumerate(made):
        averager.number = number
    return made


def give(averager: Any, new: Sequence[torch.Tensor]) -> None:
    """Load gradients into an averager, as its trainer does."""
    with torch.no_grad(), averager.get_tensors() as tensors:
        for tensor, value in zip(tensors, new, strict=True):
            tensor.copy_(value)


def gradients_of(averager: Any) -> list[torch.Tensor]:
    with averager.get_tensors() as tensors:
        return [tensor.clone() for tensor in tensors]


def state(averager: Any) -> list[torch.Tensor]:
    """Return all that a failed round may not change."""
    kept = [tensor.clone() for tensor in (*averager._ms, *averager._qs)]
    return kept + gradients_of(averager)


async def attempt(
    group: Sequence[InMemory],
    trouble: Mapping[tuple[int, str], str] | None = None,
    *,
    gathered: Any = None,
    given_up: Sequence[int] = (),
    weights: Sequence[float] | None = None,
    codec: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
) -> Room:
    """Let a group try one round; peers that fail leave it.

    Args:
        group: The peers.
        trouble: As for :class:`Room`.
        gathered: What every peer has gathered.
        given_up: Peers whose trainer gives the step up when the round is just done.
        weights: Samples of the peers, by default equal.
        codec: As for :class:`Room`.

    Returns:
        The room, in which ``succeeded`` says it for every peer.
    """
    room = Room(len(group), trouble, weights, codec)
    dumps = MSGPackSerializer.dumps
    everybody = tuple(range(len(group)))
    told = tuple(dumps([None, 0, dumps(gathered)]) for _ in group)
    info = GroupInfo(b"group", everybody, told)

    async def one(position: int, averager: InMemory) -> bool:
        averager.room, averager.number = room, position
        averager._pending_groups_registered = asyncio.Event()
        cancelled = position in given_up
        step: Any = SimpleNamespace(
            done=lambda: True, cancelled=lambda: cancelled, exception=lambda: None
        )
        STEP.set(step)
        with averager._register_allreduce_group(info):
            try:
                weight = room.weights[position]
                await averager._aggregate_with_group(info, min_vector_size=0, weight=weight)
                return True
            except MatchmakingException:
                return False
            finally:
                room.leave(position)

    tasks = [asyncio.create_task(one(at, averager)) for at, averager in enumerate(group)]
    hanging = {at for (at, _), what in room.trouble.items() if what == "hang" and at < len(group)}
    if hanging:
        others = asyncio.gather(*(t for at, t in enumerate(tasks) if at not in hanging))
        stuck = asyncio.create_task(room.hanging.wait())
        stuck_tasks = {tasks[at] for at in hanging}
        await asyncio.wait({stuck, *stuck_tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in stuck_tasks:
            task.cancel()
        await others
        stuck.cancel()
    room.succeeded = [await task for task in tasks]
    return room
