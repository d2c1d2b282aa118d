"""PowerSGD peers in one process: payload policies whose all-reduces are done in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from rayhive.averaging.payload_policy import GroupRound
from rayhive.averaging.powersgd_payload import PowerSGDOptions, PowerSGDPayload


class Room:
    """Place in which the all-reduces of a group meet.

    Args:
        size: Peers of the group.
        trouble: Failures, by peer and phase: ``before`` and ``after`` fail before and after
            the tensors were averaged, ``hang`` never ends, ``partial`` keeps every second tensor
            from being averaged.
        weights: Weights of the peers in the averages, by default equal.
        codec: Effect of encoding and decoding on a tensor, on the way there and on the way back.

    Attributes:
        given: Tensors that entered the average of a phase, by peer.
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
        """Average in place among the remaining peers; return the fraction."""
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
        complete = len(self.given[phase]) == self.size
        return 1.0 if complete and what != "partial" else 0.5


class InMemory:
    """A peer with a PowerSGD payload policy, whose all-reduces happen in a :class:`Room`.

    Attributes:
        gradients: Its averaged gradients.
        payload: The policy.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], averager_rank: int, **options: Any
    ) -> None:
        self.gradients = [torch.zeros(shape) for shape in shapes]
        self.payload = PowerSGDPayload(
            self.gradients,
            PowerSGDOptions(averager_rank, **options),
            seed="test",
            device=torch.device("cpu"),
        )

    async def take_part(
        self, room: Room, number: int, gathered: Any, weight: float, step: Any
    ) -> None:
        """Do one round as peer ``number`` of a room."""

        async def allreduce(phase: str, tensors: Sequence[torch.Tensor], *_: Any) -> float:
            return await room.allreduce(number, phase, tensors)

        members = dict.fromkeys(range(room.size), gathered)
        round_ = GroupRound(allreduce, members, weight=weight, step=step)
        if number % 2:  # it looked for a group for a while
            await self.payload.prepare(self.gradients, weight, step)
        await self.payload.average(self.gradients, round_)


def peers(count: int, shapes: Sequence[tuple[int, ...]], **options: Any) -> list[InMemory]:
    return [InMemory(shapes, **options) for _ in range(count)]


def give(peer: InMemory, new: Sequence[torch.Tensor]) -> None:
    """Load gradients into a peer, as its trainer does."""
    for tensor, value in zip(peer.gradients, new, strict=True):
        tensor.copy_(value)


def gradients_of(peer: InMemory) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in peer.gradients]


def state(peer: InMemory) -> list[torch.Tensor]:
    """Return all that a failed round may not change."""
    kept = [
        tensor.clone()
        for tensor in (*peer.payload.factors.error_feedback, *peer.payload.factors.qs)
    ]
    return kept + gradients_of(peer)


async def attempt(
    group: Sequence[InMemory],
    trouble: Mapping[tuple[int, str], str] | None = None,
    *,
    gathered: Any = None,
    given_up: Sequence[int] = (),
    weights: Sequence[float] | None = None,
    codec: Callable[[torch.Tensor], torch.Tensor] = torch.clone,
    alone: bool = False,
) -> Room:
    """Let a group try one round; peers that fail leave it.

    Args:
        group: The peers.
        trouble: As for :class:`Room`.
        gathered: What every peer has gathered.
        given_up: Peers whose trainer gives the step up when the round is just done.
        weights: Samples of the peers, by default equal.
        codec: As for :class:`Room`.
        alone: Whether averages are of equal weights, whatever the peers' own.

    Returns:
        The room, in which ``succeeded`` says it for every peer.
    """
    room = Room(len(group), trouble, None if alone else weights, codec)
    own = [1.0] * len(group) if weights is None else weights

    async def one(position: int, peer: InMemory) -> bool:
        cancelled = position in given_up
        step = SimpleNamespace(
            done=lambda: True, cancelled=lambda: cancelled, exception=lambda: None
        )
        try:
            await peer.take_part(room, position, gathered, own[position], step)
            return True
        except (Exception, asyncio.CancelledError):
            return False
        finally:
            room.leave(position)

    tasks = [asyncio.create_task(one(at, peer)) for at, peer in enumerate(group)]
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
