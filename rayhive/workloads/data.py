"""Seeded shards, endless loaders, and evaluation without side effects."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from rayhive.errors import ConfigError, Problem
from rayhive.workloads.base import Workload

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

Batch = tuple[Tensor, Tensor]
Gather = Callable[[Sequence[int]], Batch]


class SampleStream(IterableDataset[int]):
    """Endless stream of the sample indices of one peer.

    Args:
        size: Samples in the training split.
        peer: Index of the peer; indices of at least ``peers`` are late joiners.
        peers: Number of peers that share each permutation.
        seed: Determines every permutation; not negative.

    Raises:
        ConfigError: There are more peers than samples.
    """

    def __init__(self, size: int, *, peer: int, peers: int, seed: int) -> None:
        if not 1 <= peers <= size:
            allowed = f"between 1 and the {size} samples of the training split"
            raise ConfigError(Problem("swarm.peers", peers, allowed))
        self.size = size
        self.peers = peers
        self.seed = seed
        # Peers of one generation share a permutation. A late joiner begins the next generation, so
        # that it does not repeat the order of a peer that still trains.
        self.generation, self.offset = divmod(peer, peers)

    def samples_per_pass(self) -> int:
        """Return the number of samples of one pass that this peer takes."""
        return len(range(self.offset, self.size, self.peers))

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            rng = np.random.default_rng([self.seed, self.generation, number])
            yield from rng.permutation(self.size)[self.offset :: self.peers].tolist()


class IndexedWorkload(Workload):
    """Workload whose training samples are numbered, and whose peers share the numbers."""

    @abstractmethod
    def train_size(self) -> int:
        """Return the number of samples in the training split."""

    @abstractmethod
    def gather(self, peer: int, seed: int) -> Gather:
        """Return a function from sample numbers to a batch (inputs, targets).

        Args:
            peer: Index of the peer; random augmentation differs between peers.
            seed: Determines the augmentation; not negative.
        """

    def train_loader(self, *, peer: int, peers: int, batch_size: int, seed: int) -> DataLoader[Any]:
        """Return a loader of micro-batches over a :class:`SampleStream`; see the base class."""
        stream: IterableDataset[Any] = SampleStream(
            self.train_size(), peer=peer, peers=peers, seed=seed
        )
        # A loader draws a seed even if it has no workers; this keeps the global state unchanged.
        generator = torch.Generator()
        gather = self.gather(peer, seed)
        return DataLoader(stream, batch_size=batch_size, collate_fn=gather, generator=generator)


def window_count(tokens: Tensor, length: int) -> int:
    """Return the number of windows of ``length`` inputs with their next-token targets."""
    return (len(tokens) - 1) // length


def windows(tokens: Tensor, index: Sequence[int], length: int) -> Batch:
    """Return windows of a token stream.

    Args:
        tokens: The stream, shape (n,), any integer type.
        index: Numbers of the windows; window i starts at token ``i * length``.
        length: Tokens in one window.

    Returns:
        Inputs and targets, both int64 of shape (len(index), length); targets are one token later.
    """
    start = torch.as_tensor(index).unsqueeze(1) * length
    span = tokens[start + torch.arange(length + 1)].long()
    return span[:, :-1].contiguous(), span[:, 1:].contiguous()


def spread(size: int, count: int, batch: int) -> list[list[int]]:
    """Return at most ``count`` indices, evenly spaced over ``range(size)``, in batches."""
    count = min(count, size)
    index = [number * size // count for number in range(count)]
    return [index[first : first + batch] for first in range(0, count, batch)]


def next_token_loss(
    module: LightningModule, batches: Iterable[Batch], device: torch.device | str | None
) -> float:
    """Return the mean cross-entropy of ``module``'s next tokens [nats per token].

    Args:
        module: Returns logits (n, t, vocabulary) for tokens (n, t).
        batches: Inputs and targets, each of shape (n, t).
        device: Device of ``module``; None for that of its first parameter.
    """
    where = device_of(module, device)
    total, count = 0.0, 0
    with evaluation(module):
        for batch in batches:
            inputs, targets = (part.to(where) for part in batch)
            logits = module(inputs).float().flatten(0, 1)
            total += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
            count += targets.numel()
    return total / count


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator for the body, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the accelerators too.
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def evaluation(module: LightningModule) -> Iterator[None]:
    """Run the body in evaluation mode without gradients; restore the mode of every submodule."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def device_of(module: LightningModule, device: torch.device | str | None) -> torch.device:
    """Return ``device``, or the device of the first parameter of ``module``."""
    return torch.device(device) if device is not None else next(module.parameters()).device
