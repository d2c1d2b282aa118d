"""The contract of a workload: a module, its data, and what counts as having learned it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

DataKind = Literal["real", "generated"]
SchedulerFn = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class Target:
    """What "reached" means on the held-out split.

    Attributes:
        metric: A key of what :meth:`Workload.evaluate` returns.
        value: The value to reach, in the metric's own unit.
        mode: Whether the metric has to climb to the value ("max") or sink to it ("min").
    """

    metric: str
    value: float
    mode: Literal["max", "min"]

    def reached(self, value: float) -> bool:
        """Return whether ``value`` is at the target or beyond it (never so for NaN)."""
        return value >= self.value if self.mode == "max" else value <= self.value


class Workload(ABC):
    """What a swarm trains.

    A subclass takes keyword arguments only and refuses what it does not know with a
    :class:`~rayhive.errors.ConfigError`; :func:`rayhive.workloads.args.parse_args` does that.

    Attributes:
        name: The name it is known by in tables.
        default_batch_size: Samples in one micro-batch of one peer, unless a study says otherwise.
        target: What a run has to reach on the held-out split.
        data: "real" or "generated"; every row of a results table says which.
    """

    name: ClassVar[str]
    default_batch_size: ClassVar[int]
    target: Target
    data: DataKind

    @abstractmethod
    def module(self, seed: int) -> LightningModule:
        """Return a fresh module, on the CPU.

        Args:
            seed: Decides the initial parameters: the same seed gives the same bits on every peer.
                torch's global random state is left as it was.
        """

    @abstractmethod
    def train_loader(self, *, peer: int, peers: int, batch_size: int, seed: int) -> DataLoader[Any]:
        """Return the endless loader of one peer's share of the training split.

        Each pass is one permutation of the split, the same on every peer, of which this peer
        takes every ``peers``-th sample starting at ``peer``: within a pass the shares are
        disjoint and together complete.

        Args:
            peer: Which peer; an index from ``peers`` on is a late joiner and takes its share of a
                permutation of its own.
            peers: How many peers the split is divided among.
            batch_size: Samples in one micro-batch.
            seed: Decides the permutations; not negative.
        """

    @abstractmethod
    def evaluate(
        self, module: LightningModule, device: torch.device | str | None = None
    ) -> dict[str, float]:
        """Measure ``module`` on the held-out split.

        It runs in evaluation mode without gradients, restores every submodule's mode, gives the
        same numbers for the same parameters and draws nothing from the global random state.

        Args:
            module: What :meth:`module` returned, trained or not.
            device: Where ``module`` lives; by default where its first parameter is.

        Returns:
            At least "loss" (mean over the split) and the target's metric.
        """

    def train_size(self) -> int | None:
        """Return how many samples the training split has, None where counting them takes long.

        A swarm with more peers than that is refused before anything starts.
        """
        return None

    def data_files(self) -> Sequence[Path]:
        """Return the files and folders of data that decide what is measured.

        A study keeps a fingerprint of their content and does not go on with other data. Those
        that ``workload.args`` names are known; here belong the others.
        """
        return ()

    def extra_tensors(self, module: LightningModule) -> list[Tensor]:
        """Return the tensors besides parameters that peers should average with the state.

        Running statistics are the common case: buffers are each peer's own unless they are
        averaged. Integers and booleans among them are not averaged: only a joiner takes them over.
        The tensors returned are the module's own, not copies.
        """
        return []

    def scheduler_fn(self) -> SchedulerFn | None:
        """Return what makes the learning-rate scheduler for a re-created optimizer, if any.

        A strategy that builds the optimizer anew (offloading, delayed steps) cannot use the
        scheduler of ``configure_optimizers``; it makes the same one with this. One scheduler
        step is one round. None means that the module has no scheduler.
        """
        return None

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the parameters in the order of ``module.parameters()``.

        The bytes that a round sends are predicted from these.
        """
        # Not under torch's meta device: data that a workload loads meanwhile would end up there.
        return [tuple(parameter.shape) for parameter in self.module(seed=0).parameters()]
