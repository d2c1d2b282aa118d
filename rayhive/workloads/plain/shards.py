"""Disjoint shares of a user's ``DataLoader``, and samples that are held out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from rayhive.errors import ConfigError, Problem
from rayhive.workloads.data import SampleStream

#: Share of the training samples that is held out if there is no validation loader, and the most.
HELD_OUT_SHARE = 0.1
HELD_OUT_MOST = 512
_ELSE = "; a Workload of yours with a train_loader can do this"


@dataclass(frozen=True)
class TrainingData:
    """Training samples of a user's loader, which peers share.

    Args:
        loader: The user's loader.
        hold_out: Whether some of its samples are held out for evaluation.

    Attributes:
        loader: The user's loader.
        train: Samples to train on.
        held_out: Samples that are held out; None if the user has a validation loader.
    """

    loader: DataLoader[Any]
    train: Subset[Any]
    held_out: Subset[Any] | None

    @classmethod
    def of(cls, loader: Any, *, hold_out: bool, key: str, value: str) -> TrainingData:
        """Return the samples of a loader.

        Args:
            loader: Result of the user's ``train_dataloader``.
            hold_out: Whether some samples are held out for evaluation.
            key: Key of the study that named the loader's owner, for error messages.
            value: Its value.

        Raises:
            ConfigError: Peers cannot have disjoint shares of the loader's samples.
        """
        if refused := _refused(loader):
            raise ConfigError(Problem(key, value, f"a train_dataloader that returns {refused}"))
        size = len(loader.dataset)
        count = min(HELD_OUT_MOST, max(1, round(size * HELD_OUT_SHARE))) if hold_out else 0
        if size - count < 1:
            allowed = f"a train_dataloader with more samples than {size}"
            raise ConfigError(Problem(key, value, allowed))
        order = np.random.default_rng(0).permutation(size)  # the same in every replicate
        train, held_out = (
            Subset(loader.dataset, np.sort(part).tolist())
            for part in (order[count:], order[:count])
        )
        return cls(loader, train, held_out if hold_out else None)

    @property
    def batch_size(self) -> int:
        """Samples in a batch of the user's loader."""
        return int(self.loader.batch_size or 1)

    def share(self, *, peer: int, peers: int, batch_size: int, seed: int) -> DataLoader[Any]:
        """Return the endless loader of a peer's share; see :class:`SampleStream`."""
        stream = SampleStream(len(self.train), peer=peer, peers=peers, seed=seed)
        return self._loader(self.train, batch_size, stream)

    def evaluated(self) -> DataLoader[Any] | None:
        """Return the loader of the samples that are held out, in order."""
        return None if self.held_out is None else self._loader(self.held_out, self.batch_size, None)

    def _loader(self, samples: Subset[Any], batch_size: int, sampler: Any) -> DataLoader[Any]:
        return DataLoader(
            samples,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=self.loader.collate_fn,
            pin_memory=self.loader.pin_memory,
            generator=torch.Generator(),  # a loader draws a seed even if it has no workers
        )


def _refused(loader: Any) -> str | None:
    """Return the loader that would be accepted in place of this one; None if this one is."""
    if not isinstance(loader, DataLoader):
        return f"one torch DataLoader, not a {type(loader).__name__}"
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        return f"a DataLoader whose samples are numbered, not a stream{_ELSE}"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"a DataLoader with a batch_size and without a batch_sampler{_ELSE}"
    sampler = loader.sampler
    if type(sampler) not in (SequentialSampler, RandomSampler) or (
        isinstance(sampler, RandomSampler)
        and (sampler.replacement or sampler.num_samples != len(loader.dataset))
    ):
        name = type(sampler).__name__
        return f"a DataLoader without a sampler of its own (it has a {name}){_ELSE}"
    return None
