"""PowerSGD as a payload policy with transactional rounds (Vogels et al., arXiv 1905.13727)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from hivemind.averaging.allreduce import AllreduceException

from rayhive.averaging.allreduce_groups import DENSE
from rayhive.averaging.error_feedback import ErrorFeedback
from rayhive.averaging.matchmaking import round_in
from rayhive.averaging.payload_policy import GroupRound, PayloadPolicy, counted, given_up
from rayhive.averaging.policy_thread import PolicyThread
from rayhive.compression.codecs.base import made
from rayhive.compression.powersgd.factors import Factors, Tensors
from rayhive.compression.powersgd.gpu_worker import ServedFactors
from rayhive.compression.powersgd.kernels import METHODS
from rayhive.compression.powersgd.shapes import (
    DEFAULT_MIN_COMPRESSION_RATIO,
    FACTOR_CODEC,
    compressed_tensors,
    option_problems,
    phase_names,
)
from rayhive.errors import ConfigError, Problem


@dataclass(frozen=True)
class PowerSGDOptions:
    """Options of PowerSGD; equal for all peers of a swarm, except ``device``.

    Attributes:
        rank: Rank of the factors.
        min_compression_ratio: Least fraction of elements saved for a matrix to be factorised.
        num_iters_per_step: Power iterations of a round, each with an all-reduce of P and of Q.
        start_compressing_after_num_steps: Number of rounds that average the gradients themselves
            before the first with factors. Rounds are counted by the number that the peers of a
            group gather, or by this peer's own rounds if none is gathered.
        orthogonalisation: ``gram_schmidt`` as in the paper, or ``qr``.
        factor_codec: Codec of the factors in a group without a codec: ``scaled_float16``,
            ``float16``, or ``none`` as in the paper. Errors of Q are fed back.
        device: Device that multiplies the matrices; by default the device of the parameters.
            hivemind keeps averaged gradients in host memory and averages in a forked process,
            which cannot use the trainer's GPU: see
            :mod:`rayhive.compression.powersgd.gpu_worker`.
        error_feedback: Whether the errors of a lossy codec are fed back as well, see
            :mod:`rayhive.averaging.error_feedback`. Errors of Q are added to PowerSGD's own error
            feedback; errors of P need none, because any P can be used that all peers share.

    Raises:
        ConfigError: An option is out of range, or the device does not exist; lists all problems.
    """

    rank: int
    min_compression_ratio: float = DEFAULT_MIN_COMPRESSION_RATIO
    num_iters_per_step: int = 1
    start_compressing_after_num_steps: int = 0
    orthogonalisation: str = "gram_schmidt"
    factor_codec: str = FACTOR_CODEC
    device: torch.device | str | None = None
    error_feedback: bool = False

    def __post_init__(self) -> None:
        others = ("device", "error_feedback")
        options = {name: value for name, value in vars(self).items() if name not in others}
        problems = option_problems(**options) + _device_problems(self.device)
        if self.error_feedback and self.start_compressing_after_num_steps:
            key, allowed = "start_compressing_after_num_steps", "0 with error_feedback"
            problems.append(Problem(key, self.start_compressing_after_num_steps, allowed))
        if problems:
            raise ConfigError(problems)

    def device_for(self, parameters: Iterable[torch.nn.Parameter]) -> torch.device:
        """Return the device that multiplies: as asked, completed by that of the parameters."""
        found = {parameter.device for parameter in parameters}
        own = found.pop() if len(found) == 1 else torch.device("cpu")
        device = own if self.device is None else torch.device(self.device)
        return own if device.index is None and device.type == own.type else device


class _Prepared(NamedTuple):
    """First P of a round, of the gradients with which a step looks for a group."""

    step: Future[Any]
    weight: float
    ps: Tensors


class PowerSGDPayload(PayloadPolicy):
    """Policy that averages large gradients as low-rank factors P and Q.

    It follows hivemind's PowerSGD, with these differences:

    * The first Q is normally distributed as in the paper, and drawn from a seed that all peers
      share. hivemind's peers each draw their own, and factors made with different Q do not add
      up to an average.
    * A round is a transaction: gradients, Q and error feedback change at its end or not at all,
      and a round whose step the trainer had given up by then is undone. hivemind adds the
      gradient to the feedback first, so that a retry after a failure applies it twice.
    * The error feedback is the error of the peer's own factors, counted by samples. Peers may
      therefore have unequal and changing weights, and may join and leave. hivemind subtracts the
      group's approximation, which accumulates the difference between the peer's gradient and
      the group's.
    * A round fails when this peer did not get all of P: a P of its own would ruin whole
      matrices. A partial Q only makes the approximation worse.
    * A gradient that is not finite is applied as NaN, and changes neither feedback nor Q.
    * Factors are computed in a thread, not in the event loop that serves the network.

    With the default options the averaged tensors are hivemind's, so that both kinds of peers can
    form a group; of 16-bit parameters, whose averages are float32 here, they are not.

    Args:
        gradients: All averaged gradients, in memory that the processes of the peer share.
        options: Options of PowerSGD.
        seed: Any text that is equal for all peers of the swarm; Q is drawn from its hash.
        device: Device that multiplies the matrices.

    Attributes:
        compressed: Indices of the gradients that are factorised.
        factors: Arithmetic of the factors.
        feedback: Errors of the codec in gradients that are not factorised; None without error
            feedback for codecs.
    """

    def __init__(
        self,
        gradients: Sequence[torch.Tensor],
        options: PowerSGDOptions,
        *,
        seed: str,
        device: torch.device,
    ) -> None:
        shapes = [tuple(gradient.shape) for gradient in gradients]
        self.compressed = compressed_tensors(shapes, options.rank, options.min_compression_ratio)
        factorised = set(self.compressed)
        self._rest = [index for index in range(len(shapes)) if index not in factorised]
        kind = Factors if device.type == "cpu" else ServedFactors
        self.factors = kind(
            [gradients[index] for index in self.compressed],
            options.rank,
            seed=int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big"),
            orthogonalise=METHODS[options.orthogonalisation],
            device=device,
        )
        rest = [gradients[index] for index in self._rest]
        self.feedback = ErrorFeedback(rest) if options.error_feedback else None
        codec = options.factor_codec
        self._factor_codec = None if codec == "none" else made(codec).build()
        self._phases = phase_names(options.num_iters_per_step)
        self._dense_rounds = options.start_compressing_after_num_steps
        self._rounds = torch.zeros((), dtype=torch.int64)
        self._rounds.share_memory_()  # type: ignore[no-untyped-call]
        self._last_step: Future[Any] | None = None
        self._prepared: _Prepared | None = None
        elements = sum(gradient.numel() for gradient in gradients)
        self._thread = PolicyThread("powersgd", elements if kind is Factors else None)

    def phases(self, gathered: Mapping[Any, Any]) -> tuple[str, ...]:
        """Return the phases of a round: P and Q per iteration, or the dense one at first."""
        return self._phases if self._is_compressed(gathered) else (DENSE,)

    def _is_compressed(self, gathered: Mapping[Any, Any]) -> bool:
        if not self._dense_rounds:
            return True
        named = [round_in(item) for item in gathered.values()]
        numbers = [number for number in named if number is not None]
        return (max(numbers) if numbers else int(self._rounds) + 1) > self._dense_rounds

    async def prepare(
        self, tensors: Sequence[torch.Tensor], weight: float, step: Future[Any]
    ) -> None:
        """Compute P while the step looks for a group."""
        if self._dense_rounds:
            return
        await self.undo_given_up(step)
        large, weight = [tensors[index] for index in self.compressed], counted(weight)
        ps = await self._thread.run(partial(self.factors.begin, weight=weight), large)
        self._prepared = _Prepared(step, weight, ps)

    async def average(self, tensors: Sequence[torch.Tensor], round_: GroupRound) -> None:
        """Replace gradients by their average, factorised ones by their approximation.

        On any failure nothing has changed.

        Raises:
            AllreduceException: Only a part of a phase before the last one was averaged.
        """
        await self.undo_given_up(round_.step)
        prepared, self._prepared = self._prepared, None  # any round overwrites what belongs to it
        if self._is_compressed(round_.gathered):
            await self._average_factors(tensors, round_, prepared)
        else:
            await self._average_densely(tensors, round_)
        self._rounds += 1

    async def undo_given_up(self, current: Future[Any] | None = None) -> None:
        """Undo the last round if its step was given up before the trainer got its result."""
        step, self._last_step = self._last_step, None
        if given_up(step, current):
            await self._thread.run(self._undo)

    def _undo(self) -> None:
        self.factors.undo()
        if self.feedback is not None:
            self.feedback.undo()

    async def _average_densely(self, gradients: Sequence[torch.Tensor], round_: GroupRound) -> None:
        """Replace gradients by their average without factors."""
        averaged = [_copy(gradient) for gradient in gradients]
        await round_.allreduce(DENSE, averaged)
        if not round_.auxiliary:
            for gradient, new in zip(gradients, averaged, strict=True):
                gradient.copy_(new)

    async def _average_factors(
        self,
        gradients: Sequence[torch.Tensor],
        round_: GroupRound,
        prepared: _Prepared | None,
    ) -> None:
        """Replace gradients by their average, factorised ones by their approximation."""
        run, weight = self._thread.run, counted(round_.weight)
        large = [gradients[index] for index in self.compressed]
        small = [gradients[index] for index in self._rest]
        if self.feedback is None:
            averaged = [_copy(gradient) for gradient in small]
        else:
            averaged = await run(self.feedback.begin, small, weight)
        qs: Tensors = []
        owed: Tensors | None = None
        codec = self._factor_codec if round_.plain else None
        for phase in self._phases:
            if phase.startswith("P"):
                if qs:
                    ps = await run(self.factors.project, qs)
                elif prepared is not None and prepared[:2] == (round_.step, weight):
                    ps = prepared.ps
                else:
                    ps = await run(partial(self.factors.begin, weight=weight), large)
                sent = self.factors.unstacked(ps)
            else:
                qs = await run(self.factors.backproject, ps)
                sent = self.factors.unstacked(qs)
            last = phase == self._phases[-1]
            exact = 0
            if last:
                if self.feedback is not None:
                    owed = [torch.zeros_like(q) for q in sent] + self.feedback.owed
                elif codec is not None:
                    owed = [torch.zeros_like(tensor) for tensor in sent + averaged]
                exact = 0 if codec is None else len(averaged)
                sent += averaged
            fraction = await round_.allreduce(phase, sent, owed, exact, codec)
            if fraction < 1 and not last:
                raise AllreduceException(f"only {fraction:.1%} of phase {phase} was averaged")
        if not round_.auxiliary:
            errors = None if owed is None else owed[: len(large)]
            await run(self._commit, large, ps, qs, errors, small, averaged, final=True)
            self._last_step = round_.step

    @torch.no_grad()
    def _commit(
        self,
        large: Tensors,
        ps: Tensors,
        qs: Tensors,
        errors: Tensors | None,
        small: Tensors,
        averaged: Tensors,
    ) -> None:
        self.factors.commit(large, ps, qs, errors)
        if self.feedback is not None:
            self.feedback.commit(small)
            return
        for gradient, new in zip(small, averaged, strict=True):
            gradient.copy_(new)

    @torch.no_grad()
    def snapshot(self) -> tuple[dict[str, Any], Tensors]:
        """Return the metadata and the Q that a joining peer needs to factorise like the group."""
        return {"rounds": int(self._rounds)}, [q.clone() for q in self.factors.qs]

    @torch.no_grad()
    def restore(self, metadata: Mapping[str, Any], qs: Sequence[torch.Tensor]) -> bool:
        """Take over the Q of another peer; the error feedback of this peer stays.

        Args:
            metadata: First part of the other peer's :meth:`snapshot`.
            qs: Second part.

        Returns:
            Whether the Q fitted and were taken over.
        """
        if [q.shape for q in qs] != [q.shape for q in self.factors.qs]:
            return False
        if not all(bool(q.isfinite().all()) for q in qs):
            return False
        for own, new in zip(self.factors.qs, qs, strict=True):
            own.copy_(new)
        self._rounds.fill_(metadata.get("rounds", int(self._rounds)))
        return True

    def close(self) -> None:
        """End the thread that serves factors from the trainer's process, if there is one."""
        self.factors.close()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that can be cut into parts, whatever the strides of the original."""
    return tensor.clone(memory_format=torch.contiguous_format)


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
