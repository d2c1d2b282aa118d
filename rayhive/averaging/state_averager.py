"""Averager of parameters, optimizer statistics and extra tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from statistics import fmean
from typing import Any, TypeVar

import torch
from hivemind.compression import (
    CompressionBase,
    CompressionInfo,
    NoCompression,
    RoleAdaptiveCompression,
    TensorRole,
)
from hivemind.optim.state_averager import TrainingStateAverager

from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.extra_tensors import ExtraTensors, FloatsOnly
from rayhive.averaging.optimizer_statistics import averageable, kept_in_place, statistics
from rayhive.averaging.state_download import OwnState
from rayhive.averaging.tensor_memory import empty_shared
from rayhive.averaging.tensor_summary import floats, norm_of, with_digest


class InlineExecutor(Executor):
    """Executor that runs each call at once, in the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function and return its result in a future; errors propagate to the caller."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


T = TypeVar("T")
P = TypeVar("P", bound=Hashable)

#: Weight of a side of a partition that committed no rounds. Non-zero, so that the weights do not
#: sum to 0 if no side did.
LEAST_ROUNDS = 1e-6


def weights(gathered: Mapping[P, tuple[tuple[str, ...], int | None]]) -> dict[P, float]:
    """Return the weight of each peer's parameters, relative to the largest one.

    The peers of one side of a partition have the same parameters. Each of them therefore gets an
    equal share of the rounds of its side, also if others of its side come later and bring theirs.
    A peer that was in no partition gets the mean weight of the peers that were.

    Args:
        gathered: For each peer, the members of its side of the partition, and the number of
            rounds that it committed during the partition; None if it was in none.
    """
    rounds: dict[tuple[str, ...], int] = {}
    for side, apart in gathered.values():
        if apart is not None:
            rounds[side] = max(rounds.get(side, 0), apart)
    if not rounds:
        return dict.fromkeys(gathered, 1.0)
    shares = {side: max(done, LEAST_ROUNDS) / max(1, len(side)) for side, done in rounds.items()}
    usual = fmean(shares[side] for side, apart in gathered.values() if apart is not None)
    found = {p: usual if apart is None else shares[side] for p, (side, apart) in gathered.items()}
    return {peer: share / max(found.values()) for peer, share in found.items()}


def parameter_weight(weight: float, own: Any, gathered: Mapping[Any, Any]) -> float:
    """Return the weight of a peer's parameters in a round.

    Args:
        weight: Weight of its step.
        own: The peer.
        gathered: Data of each peer of the group: the round, the members of the peer's side of a
            partition and the rounds that it committed there. Other data are left out.
    """
    found = {
        peer: (tuple(content[1]), content[2])
        for peer, content in gathered.items()
        if isinstance(content, (list, tuple)) and len(content) == 3
    }
    return weight * weights(found)[own] if weight and own in found else weight


#: Options with which a step may go on in the background, or wait for peers.
MAY_LAST = ("delay_optimizer_step", "delay_averaging", "averaging_round", "wait_for_trigger")


class RayhiveStateAverager(TrainingStateAverager, MeasuredAverager):
    """Averager of the training state.

    Parameters enter the average with a weight that takes the rounds of a partition into account
    (:mod:`rayhive.averaging.state_averager`). Extra tensors are averaged through copies on the host
    (:class:`rayhive.averaging.extra_tensors.ExtraTensors`).

    Args:
        extra_tensors: Tensors of the module besides its parameters, of any dtype and device.
        compression: Codec of the averaging.
        state_compression: Codec of a state that is sent to a joining peer.
        all_statistics: Average all statistics of the inner optimizer with the parameters, not only
            those named by ``average_opt_statistics``. They are sent as float32, because a codec
            may make small second moments negative. Equal for all peers of a swarm.
        elsewhere: Extra tensors that are averaged elsewhere: only a joining peer takes them over.
        kwargs: As those of hivemind's and of :class:`MeasuredAverager`. The direction of parameters
            means nothing: the outlier filter's rule ``direction`` acts on them as ``norm``.

    Attributes:
        lossy: Whether averaging leaves a difference between replicas, because of its codec.
        on_serving: Called with the tensors of the state for a joining peer; returns the tensors to
            send. None sends them unchanged.
        on_parameters: Called with the parameters of an offloaded optimizer when they have changed.
            None copies them to the module.
        stale_round: The round whose parameters these are, on a peer that went on to a later one
            without newer ones; else None.
    """

    wire_name = "TrainingStateAverager"
    step_executor: Executor
    opt_keys_for_averaging: tuple[str, ...]
    on_serving: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] | None = None
    on_parameters: Callable[[Sequence[torch.Tensor]], None] | None = None
    stale_round: int | None = None

    #: The round that the tensors still belong to while a later one has begun; else None.
    _round_left: int | None = None
    #: Whether the averaged tensors are copies of the local ones, or averages of these.
    _loaded = False

    def __init__(
        self,
        *,
        extra_tensors: Sequence[torch.Tensor] = (),
        compression: CompressionBase | None = None,
        state_compression: CompressionBase | None = None,
        all_statistics: bool = False,
        elsewhere: Sequence[torch.Tensor] = (),
        **kwargs: Any,
    ) -> None:
        self._extras = ExtraTensors(extra_tensors, elsewhere)
        self._all_statistics = all_statistics
        averaging = NoCompression() if compression is None else compression
        self.lossy = not isinstance(averaging, NoCompression)
        if self.lossy:
            averaging = _parameters_only(averaging)
        codec = NoCompression() if state_compression is None else state_compression
        super().__init__(
            compression=averaging,
            differences=self.lossy,
            sketches=False,
            weighting=parameter_weight,
            extra_tensors=extra_tensors,
            state_compression=_parameters_only(FloatsOnly(codec)),
            trainer_tensors=self.trainer_tensors,
            **kwargs,
        )
        self._empty()

    def trainer_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the parameters, their gradients and the statistics of the optimizer."""
        groups = self.optimizer.param_groups
        optimized = [parameter for group in groups for parameter in group["params"]]
        for parameter in (*self.main_parameters, *optimized):
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from statistics(self.optimizer)

    def _local_tensors(self) -> Iterator[torch.Tensor]:
        return (t for t in super()._local_tensors() if not self._extras.keeps(t))

    def _init_averaged_tensors(self) -> Sequence[torch.Tensor]:
        if self._all_statistics and not self.opt_keys_for_averaging:
            self.opt_keys_for_averaging = averageable(self.optimizer)
        tensors: Sequence[torch.Tensor] = super()._init_averaged_tensors()
        return tensors

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Any:
        """Load the newest state of the swarm, if a peer sends it; see hivemind."""
        with kept_in_place(self.optimizer):
            loaded = super().load_state_from_peers(wait=wait, timeout=timeout)
        self._empty()
        return loaded

    def own_state(self) -> OwnState:
        """Return the norm of the parameters, and which extra tensors are masks."""
        groups = self.optimizer.param_groups
        parameters = [parameter for group in groups for parameter in group["params"]]
        return OwnState(norm_of(floats(parameters)), self._extras.masks())

    def _load_local_tensors_into_averager_(self) -> None:
        super()._load_local_tensors_into_averager_()
        self._loaded = True

    def _apply_averaging_results_(self) -> None:
        if self._loaded:  # else the step failed before its averaging
            super()._apply_averaging_results_()
            self._empty()

    def _empty(self) -> None:
        """Give back the memory of the averaged tensors if the next averaging may never come."""
        self._loaded = False
        if self._all_statistics and not self.reuse_tensors:
            with self.get_tensors() as tensors:
                empty_shared(tensors)

    def _init_tensor_infos(self) -> Sequence[CompressionInfo]:
        return self._extras.averaged_infos(super()._init_tensor_infos())

    def _make_host_tensor(
        self, source_tensor: torch.Tensor, force_copy: bool = False
    ) -> torch.Tensor:
        force_copy |= self._extras.averages(source_tensor)
        copy: torch.Tensor = super()._make_host_tensor(source_tensor, force_copy)
        return copy

    def get_current_state(self) -> tuple[Any, Sequence[torch.Tensor], Sequence[CompressionInfo]]:
        """Return the state for a joining peer: a copy of the state after one round, and its digest.

        hivemind hands out the tensors themselves, which go on changing while they are sent, and
        the number of a round that may only have begun.
        """
        with self.lock_optimizer:
            round_ = self.local_epoch if self._round_left is None else self._round_left
            round_ = round_ if self.stale_round is None else self.stale_round
            metadata, tensors, infos = super().get_current_state()
            with self.lock_averaged_tensors:
                tensors = [tensor.clone() for tensor in tensors]
        metadata["epoch"] = round_
        shared = sum(info.role == TensorRole.PARAMETER for info in infos)
        metadata = with_digest(metadata, tensors[:shared])
        served = tensors if self.on_serving is None else self.on_serving(tensors)
        return metadata, served, infos

    def _apply_optimizer_parameters_(self) -> None:
        if self.on_parameters is None:
            super()._apply_optimizer_parameters_()
            return
        groups = self.optimizer.param_groups
        self.on_parameters([parameter for group in groups for parameter in group["params"]])

    def between_steps(self, read: Callable[[], T]) -> T:
        """Call a function while no step in the background changes the parameters."""
        with self.lock_optimizer:
            return read()

    def settled_parameters(self) -> list[torch.Tensor] | None:
        """Return the parameters that the inner optimizer steps, in order.

        Returns:
            None while background work may change them.
        """
        if self.pending_updates or self.averaging_in_progress:
            return None
        groups = self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step as hivemind does, without threads where nothing goes on in the background.

        An offloaded optimizer's extra tensors are averaged in the same round as the parameters.
        A call that only applies delayed updates returns at once if there can be none.
        """
        if not args and kwargs == {"apply_delayed_updates": True}:
            finished = (self.finished_averaging_round, self.finished_optimizer_step)
            if not self.pending_updates and not any(event.is_set() for event in finished):
                return None
        if kwargs.get("increment_epoch"):
            self._round_left = self.local_epoch
        background = self.step_executor
        if not self.pending_updates and not any(map(kwargs.get, MAY_LAST)):
            self.step_executor = InlineExecutor()  # saves two changes of threads
        try:
            if self.reuse_tensors and kwargs.get("averaging_round") and self._extras.averaged:
                self._begin_extras(kwargs)
            result = super().step(*args, **kwargs)
            self._apply_extras()
            return result
        finally:
            self.step_executor = background
            if not self.pending_updates:
                self._round_left = None

    def _begin_extras(self, options: dict[str, Any]) -> None:
        """Copy extra tensors for the round of a step, and schedule the round if it is not yet."""
        TrainingStateAverager.step(self, wait_for_delayed_updates=True)
        self._apply_extras()
        if options.get("averaging_control") is None:
            averaging = options.get("averaging_opts") or {}
            options["averaging_control"] = self.schedule_step(gather=self.local_epoch, **averaging)
        with self.get_tensors() as tensors:
            self._extras.begin(tensors, options["averaging_control"])

    def _apply_extras(self) -> None:
        """Copy averaged extra tensors back to the module, if their round has ended."""
        if self._extras.round_ended:
            with self.get_tensors() as tensors:
                self._extras.apply(tensors)

    def _update_scheduler(self) -> None:
        """Step the scheduler as hivemind does: the last change of a round before averaging."""
        super()._update_scheduler()
        self._round_left = None


def _parameters_only(codec: CompressionBase) -> CompressionBase:
    """Return a codec of parameters: variances, of batch norm and of Adam, could become negative."""
    return RoleAdaptiveCompression(default=NoCompression(), parameter=codec)
