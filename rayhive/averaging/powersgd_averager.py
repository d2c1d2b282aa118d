"""PowerSGD whose error feedback survives failed rounds (Vogels et al., arXiv 1905.13727)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch
from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import enter_asynchronously

from rayhive.averaging.matchmaking import round_in
from rayhive.compression.powersgd.factors import Factors
from rayhive.compression.powersgd.gpu_worker import ServedFactors
from rayhive.compression.powersgd.orthogonalise import METHODS
from rayhive.compression.powersgd.shapes import (
    DEFAULT_MIN_COMPRESSION_RATIO,
    compressed_tensors,
    option_problems,
    phase_names,
)
from rayhive.errors import ConfigError, Problem

Result = TypeVar("Result")
#: The step that the current task belongs to, if it runs in one.
STEP: ContextVar[StepControl | None] = ContextVar("STEP", default=None)


class TransactionalPowerSGD(PowerSGDGradientAverager):
    """PowerSGD as hivemind runs it, except where a failure or another peer would hurt.

    * The first Q is drawn from a seed that all peers of a prefix share, normally distributed as
      in the paper. hivemind's peers each draw their own, and factors made with different Q do not
      add up to an average.
    * A round changes gradients, Q and error feedback at its end or not at all; a step that the
      trainer had given up by then is taken back. hivemind adds the gradient to the feedback
      first: after a failure the retry would apply it twice.
    * The error feedback is the error of the peer's own factors, counted by samples, so that
      peers may have unequal weights, which change, and may come and go. hivemind subtracts the
      group's approximation: the difference between a peer's gradient and the group's piles up.
    * A round fails when this peer did not get all of P: with a P of its own it would ruin whole
      matrices. A partial Q only makes for a worse approximation.
    * A gradient that is not finite passes, and leaves nothing behind.
    * Factors are computed in a thread, not in the event loop that serves the network.

    With the default options the tensors that are averaged are hivemind's, so that both kinds of
    peers can form a group. All peers of a swarm need the same options, except ``device``.

    Args:
        parameters: As hivemind's.
        averager_rank: Rank of the factors.
        prefix: As hivemind's; it also seeds Q.
        min_compression_ratio: Least fraction saved for a matrix to be factorised.
        num_iters_per_step: Power iterations of a round, each with an all-reduce of P and of Q.
        start_compressing_after_num_steps: Rounds that average the gradients themselves. They are
            counted by the number of the round that peers gather, else by the rounds of this peer.
        orthogonalisation: ``gram_schmidt`` as in the paper, or ``qr``.
        device: Where the matrices are multiplied, by default where the parameters are. hivemind
            keeps averaged gradients in host memory and averages in a forked process, which cannot
            use the trainer's GPU: see :mod:`rayhive.compression.powersgd.gpu_worker`.
        start: Start the averager's process at once.
        kwargs: As hivemind's.

    Raises:
        ConfigError: Options are out of range, or there is no such device.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        averager_rank: int,
        *,
        prefix: str,
        min_compression_ratio: float = DEFAULT_MIN_COMPRESSION_RATIO,
        num_iters_per_step: int = 1,
        start_compressing_after_num_steps: int = 0,
        orthogonalisation: str = "gram_schmidt",
        device: torch.device | str | None = None,
        start: bool,
        **kwargs: Any,
    ) -> None:
        problems = option_problems(
            averager_rank,
            min_compression_ratio,
            num_iters_per_step=num_iters_per_step,
            start_compressing_after_num_steps=start_compressing_after_num_steps,
            orthogonalisation=orthogonalisation,
        )
        problems += _device_problems(device)
        if problems:
            raise ConfigError(problems)
        parameters = tuple(parameters)
        shapes = [tuple(parameter.shape) for parameter in parameters]
        self.rank = averager_rank
        self.compressed = compressed_tensors(shapes, averager_rank, min_compression_ratio)
        self._uncompressed_gradients_indexes = set(range(len(shapes))) - set(self.compressed)
        self._factors = self._make_factors(
            _device(device, parameters),
            [shapes[index] for index in self.compressed],
            averager_rank,
            seed=int.from_bytes(hashlib.sha256(prefix.encode()).digest()[:8], "big"),
            orthogonalise=METHODS[orthogonalisation],
        )
        self._qs = self._factors.qs
        self._phases = phase_names(num_iters_per_step)
        self._dense_rounds = start_compressing_after_num_steps
        self._rounds = torch.zeros((), dtype=torch.int64)
        self._rounds.share_memory_()  # type: ignore[no-untyped-call]
        self._last_step: StepControl | None = None
        self._thread: ThreadPoolExecutor | None = None
        # Past hivemind's own constructor: it would allocate all of this once more.
        super(PowerSGDGradientAverager, self).__init__(
            parameters, prefix=prefix, start=start, **kwargs
        )

    def _make_factors(self, device: torch.device, *args: Any, **kwargs: Any) -> Factors:
        if device.type == "cpu":
            return Factors(*args, device=device, **kwargs)
        return ServedFactors(*args, device=device, gradients=self._large, **kwargs)

    def _large(self) -> list[torch.Tensor]:
        """Return the gradients that are factorised; who averages them holds their lock."""
        return [self._averaged_tensors[index] for index in self.compressed]

    def shutdown(self) -> None:
        """Leave the swarm."""
        super().shutdown()
        self._factors.close()

    @property
    def _contributes(self) -> bool:
        """Whether this peer counts; else its error feedback neither enters nor changes."""
        return True

    @property
    def _ms(self) -> list[torch.Tensor]:
        """Error feedback, under hivemind's name for it."""
        return self._factors.owed

    async def _step(self, *, step: StepControl, future_for_init: MPFuture) -> None:
        STEP.set(step)  # for this step alone: it runs as a task
        await super()._step(step=step, future_for_init=future_for_init)

    @contextlib.contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        """Let groupmates find the all-reduces of a round."""
        names = self._phases if self._is_compressed(group_info) else ("",)
        ids = [_allreduce_id(group_info, name) for name in names]
        self._running_groups.update({key: asyncio.Future() for key in ids})
        self._pending_groups_registered.set()
        try:
            yield
        finally:
            for key in ids:
                self._running_groups.pop(key, None)
            self._pending_groups_registered.set()

    def _is_compressed(self, group_info: GroupInfo) -> bool:
        """Say whether a group's round uses factors; all its members say the same."""
        if not self._dense_rounds:
            return True
        named = [round_in(item) for item in self._gathered(group_info).values()]
        numbers = [number for number in named if number is not None]
        return (max(numbers) if numbers else int(self._rounds) + 1) > self._dense_rounds

    def _gathered(self, group_info: GroupInfo) -> dict[Any, Any]:
        members = [self.serializer.loads(item) for item in group_info.gathered]
        return {
            peer: self.serializer.loads(data)
            for peer, (_, _, data) in zip(group_info.peer_ids, members, strict=True)
        }

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> dict[Any, Any]:
        """Run one round in a group; on any failure nothing has changed.

        Raises:
            MatchmakingException: The round failed; the caller may try again.
        """
        try:
            members = [self.serializer.loads(item) for item in group_info.gathered]
            client = AveragingMode.CLIENT.value
            bandwidths = [0.0 if mode == client else speed for speed, mode, _ in members]
            fractions = await asyncio.get_running_loop().run_in_executor(
                None, load_balance_peers, self.total_size, bandwidths, min_vector_size
            )
            kwargs.update(peer_fractions=fractions)
            async with enter_asynchronously(self.get_tensors()) as gradients:
                await self._take_back()
                if self._is_compressed(group_info):
                    await self._average_factors(gradients, group_info, kwargs)
                else:
                    await self._average_densely(gradients, group_info, kwargs)
                self._rounds += 1
        except BaseException as error:
            raise MatchmakingException(f"PowerSGD round failed: {error!r}") from error
        return self._gathered(group_info)

    async def _take_back(self) -> None:
        """Undo the last round if its step was given up before the trainer heard of it."""
        step, self._last_step = self._last_step, None
        if step is None or step is STEP.get():
            return
        if not step.done() or step.cancelled() or step.exception() is not None:
            await self._in_thread(self._factors.undo)

    async def _average_densely(
        self, gradients: tuple[torch.Tensor, ...], group_info: GroupInfo, options: dict[str, Any]
    ) -> None:
        """Replace gradients by their average, as without PowerSGD."""
        averaged = [_copy(gradient) for gradient in gradients]
        await self._run_allreduce_inplace_(
            averaged, group_info, _allreduce_id(group_info, ""), **options
        )
        if self.mode != AveragingMode.AUX:
            for gradient, new in zip(gradients, averaged, strict=True):
                gradient.copy_(new)

    async def _average_factors(
        self, gradients: tuple[torch.Tensor, ...], group_info: GroupInfo, options: dict[str, Any]
    ) -> None:
        """Replace gradients by their average, large ones by their common approximation."""
        large = [gradients[index] for index in self.compressed]
        small = [gradients[index] for index in sorted(self._uncompressed_gradients_indexes)]
        averaged = [_copy(gradient) for gradient in small]
        weight = options.get("weight", 1.0) if self._contributes else 0.0
        begin = partial(self._factors.begin, weight=weight)
        qs: list[torch.Tensor] = []
        for phase in self._phases:
            allreduce_id = _allreduce_id(group_info, phase)
            if phase.startswith("P"):
                if qs:
                    ps = await self._in_thread(self._factors.project, qs)
                else:
                    ps = await self._in_thread(begin, large)
                sent = self._factors.unstacked(ps)
            else:
                qs = await self._in_thread(self._factors.backproject, ps)
                sent = self._factors.unstacked(qs)
            last = phase == self._phases[-1]
            if last:
                sent += averaged
            await self._run_allreduce_inplace_(sent, group_info, allreduce_id, **options)
            fraction = self._fraction(allreduce_id)
            if fraction < 1 and not last:
                raise AllreduceException(f"only {fraction:.1%} of phase {phase} was averaged")
        if self.mode != AveragingMode.AUX:
            await self._in_thread(self._commit, large, ps, qs, small, averaged)
            self._last_step = STEP.get()

    def _commit(
        self,
        large: list[torch.Tensor],
        ps: list[torch.Tensor],
        qs: list[torch.Tensor],
        small: list[torch.Tensor],
        averaged: list[torch.Tensor],
    ) -> None:
        self._factors.commit(large, ps, qs)
        for gradient, new in zip(small, averaged, strict=True):
            gradient.copy_(new)

    def _fraction(self, allreduce_id: bytes) -> float:
        """Return the share of an all-reduce that happened, as far as its runner can tell."""
        future = self._running_groups.get(allreduce_id)
        runner: Any = future.result() if future is not None and future.done() else None
        return float(runner.fraction()) if hasattr(runner, "fraction") else 1.0

    async def _in_thread(self, work: Callable[..., Result], *args: Any) -> Result:
        """Run work in the averager's only thread for it, to its end even when cancelled.

        Only so can a round that is given up leave nothing half done, and nothing running that
        writes where the next attempt works.
        """
        if self._thread is None:  # not before the fork
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="powersgd")
        inside = contextvars.copy_context().run  # it asks which step it works for
        job = asyncio.get_running_loop().run_in_executor(self._thread, inside, work, *args)
        cancelled = False
        while not job.done():
            try:
                await asyncio.wait({job})
            except asyncio.CancelledError:
                cancelled = True
        result = job.result()
        if cancelled and work != self._commit:
            raise asyncio.CancelledError
        return result

    def get_current_state(self) -> tuple[Any, list[torch.Tensor], list[CompressionInfo]]:
        """Return what a peer that joins needs in order to factorise like the others: every Q."""
        with torch.no_grad(), self.lock_averaged_tensors:
            qs, rounds = [q.clone() for q in self._qs], int(self._rounds)
        infos = [
            CompressionInfo.from_tensor(q, key=f"buffer_q_{index}", role=TensorRole.GRADIENT)
            for index, q in enumerate(qs)
        ]
        return {"group_bits": self.get_group_bits(), "rounds": rounds}, qs, infos

    def load_state_from_peers(self, **kwargs: Any) -> bool:
        """Take over the Q of a peer; error feedback is every peer's own and stays.

        Returns:
            Whether a peer had one that fits.
        """
        loaded = super(PowerSGDGradientAverager, self).load_state_from_peers(**kwargs)
        if loaded is None:
            return False
        metadata, qs = loaded
        if [q.shape for q in qs] != [q.shape for q in self._qs]:
            return False
        if not all(q.isfinite().all() for q in qs):
            return False
        with torch.no_grad(), self.lock_averaged_tensors:
            for own, new in zip(self._qs, qs, strict=True):
                own.copy_(new)
            self._rounds.fill_(metadata.get("rounds", int(self._rounds)))
        return True


def _allreduce_id(group_info: GroupInfo, phase: str) -> bytes:
    """Return the id of one all-reduce of a group, hivemind's where it has the same one."""
    return bytes(group_info.group_id) + (f"PHASE_{phase}" if phase else "").encode()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that can be cut into parts, whatever the strides of the original."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _device(
    asked: torch.device | str | None, parameters: Iterable[torch.nn.Parameter]
) -> torch.device:
    """Return where to multiply: as asked, and where that says too little, where parameters are."""
    found = {parameter.device for parameter in parameters}
    own = found.pop() if len(found) == 1 else torch.device("cpu")
    device = own if asked is None else torch.device(asked)
    return own if device.index is None and device.type == own.type else device


def _device_problems(device: torch.device | str | None) -> list[Problem]:
    if device is None:
        return []
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError):
        return [Problem("device", device, "a torch device")]
    if asked.type == "cuda" and (asked.index or 0) >= torch.cuda.device_count():
        return [Problem("device", device, f"cpu, or one of {torch.cuda.device_count()} of CUDA")]
    return []
