"""Base of a workload: a module, its data and its target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

#: Kind of the data: ``own`` is data of the user's, of which rayhive knows nothing.
DataKind = Literal["real", "generated", "own"]
SchedulerFn = Callable[[Optimizer], LRScheduler]
Device = torch.device | str | None


@dataclass(frozen=True)
class Target:
    """Value of a metric on the held-out split at which a run has converged.

    Attributes:
        metric: A key of the result of :meth:`Workload.evaluate`.
        value: The value to reach, in the unit of the metric.
        mode: Whether larger ("max") or smaller ("min") values of the metric are better.
    """

    metric: str
    value: float
    mode: Literal["max", "min"]

    def reached(self, value: float) -> bool:
        """Return whether ``value`` is at the target or better; False for NaN."""
        return value >= self.value if self.mode == "max" else value <= self.value


class Workload(ABC):
    """Module, data and target of a training run.

    A subclass takes keyword arguments only. It refuses unknown ones with a
    :class:`~rayhive.errors.ConfigError`, as :func:`rayhive.workloads.args.parse_args` does.

    Attributes:
        name: Its name in tables.
        default_batch_size: Samples in one micro-batch of one peer, if a study sets no other.
        target: Metric and value that a run has to reach on the held-out split; None without one.
        data: "real", "generated" or "own"; every row of a results table shows it.
    """

    name: str
    default_batch_size: int
    target: Target | None
    data: DataKind

    @abstractmethod
    def module(self, seed: int) -> LightningModule:
        """Return a fresh module, on the CPU.

        Args:
            seed: Determines the initial parameters: the same seed gives the same bits on every
                peer. Torch's global random state is not changed.
        """

    @abstractmethod
    def train_loader(self, *, peer: int, peers: int, batch_size: int, seed: int) -> DataLoader[Any]:
        """Return the endless loader of one peer's share of the training split.

        Each pass is one permutation of the split, the same on every peer. A peer takes every
        ``peers``-th sample of it, starting at ``peer``. Within a pass the shares are disjoint and
        together complete.

        Args:
            peer: Index of the peer. An index of at least ``peers`` is a late joiner, which takes
                its share of a permutation of its own.
            peers: Number of peers that share the split.
            batch_size: Samples in one micro-batch.
            seed: Determines the permutations; not negative.
        """

    @abstractmethod
    def evaluate(self, module: LightningModule, device: Device = None) -> dict[str, float]:
        """Measure ``module`` on the held-out split.

        Runs in evaluation mode without gradients, and restores the mode of every submodule. Equal
        parameters give equal numbers. The global random state is not used.

        Args:
            module: A module from :meth:`module`, trained or not.
            device: Device of ``module``; by default that of its first parameter.

        Returns:
            At least "loss" (mean over the split) and the target's metric.
        """

    def metrics(self) -> tuple[str, ...]:
        """Return the names of the metrics that :meth:`evaluate` returns, in any order."""
        return tuple(self.evaluate(self.module(seed=0)))

    def check(self) -> None:  # noqa: B027  (a check is optional)
        """Try the workload, before anything starts.

        Raises:
            ConfigError: It would fail in a peer.
        """

    def train_size(self) -> int | None:
        """Return the number of samples in the training split, or None if counting takes long.

        A swarm with more peers than samples is refused before anything starts.
        """
        return None

    def data_files(self) -> Sequence[Path]:
        """Return the files and folders of data that measurements depend on.

        A study keeps a fingerprint of their content and refuses to continue with other data.
        Files named in ``workload.args`` are fingerprinted anyway and need not be returned.
        """
        return ()

    def extra_tensors(self, module: LightningModule) -> list[Tensor]:
        """Return the tensors besides parameters that peers average.

        Running statistics are the common case: a buffer that is not returned differs between
        peers. Integers and booleans are not averaged; only a joiner takes them over. The tensors
        are those of the module, not copies.
        """
        return []

    def scheduler_fn(self) -> SchedulerFn | None:
        """Return a factory of the learning-rate scheduler, or None if the module has none.

        A strategy that re-creates the optimizer (offloading, delayed steps) cannot use the
        scheduler of ``configure_optimizers``, and makes an equal one with this factory. One
        scheduler step is one round.
        """
        return None

    def parameter_shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the trained parameters in the order of ``module.parameters()``.

        The bytes of a round are predicted from them; frozen parameters do not travel.
        """
        # Not on torch's meta device: data that a workload loads meanwhile would be there, too.
        return trained_shapes(self.module(seed=0))


def trained_shapes(module: LightningModule) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a module that are trained, in their order."""
    parameters = module.parameters()
    return [tuple(parameter.shape) for parameter in parameters if parameter.requires_grad]
