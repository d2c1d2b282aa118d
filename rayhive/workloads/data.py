"""What the workloads share: seeded shards, endless loaders, evaluation without side effects."""

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
    """The endless stream of sample indices that one peer trains on.

    Args:
        size: Samples in the training split.
        peer: Which peer; indices from ``peers`` on are late joiners.
        peers: How many peers share each permutation.
        seed: Decides every permutation; not negative.

    Raises:
        ConfigError: There are more peers than samples, so that some would have none.
    """

    def __init__(self, size: int, *, peer: int, peers: int, seed: int) -> None:
        if not 1 <= peers <= size:
            allowed = f"between 1 and the {size} samples of the training split"
            raise ConfigError(Problem("swarm.peers", peers, allowed))
        self.size = size
        self.peers = peers
        self.seed = seed
        # Peers of one generation divide a permutation; a late joiner opens the next generation,
        # so that it does not repeat the order of a peer that is still there.
        self.generation, self.offset = divmod(peer, peers)

    def samples_per_pass(self) -> int:
        """Return how many samples of one pass are this peer's."""
        return len(range(self.offset, self.size, self.peers))

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            rng = np.random.default_rng([self.seed, self.generation, number])
            yield from rng.permutation(self.size)[self.offset :: self.peers].tolist()


class IndexedWorkload(Workload):
    """A workload whose training samples are numbered; peers divide the numbers among them."""

    @abstractmethod
    def train_size(self) -> int:
        """Return how many samples the training split has."""

    @abstractmethod
    def gather(self, peer: int, seed: int) -> Gather:
        """Return what makes a batch (inputs, targets) out of sample numbers, all in one go.

        Args:
            peer: Whose batches they are: what alters them at random does so differently for each.
            seed: Decides what is random; not negative.
        """

    def train_loader(self, *, peer: int, peers: int, batch_size: int, seed: int) -> DataLoader[Any]:
        """Return a loader of micro-batches over a :class:`SampleStream`; see the base class."""
        stream: IterableDataset[Any] = SampleStream(
            self.train_size(), peer=peer, peers=peers, seed=seed
        )
        # A loader draws a seed for its workers even when it has none; not from the global state.
        generator = torch.Generator()
        gather = self.gather(peer, seed)
        return DataLoader(stream, batch_size=batch_size, collate_fn=gather, generator=generator)


def window_count(tokens: Tensor, length: int) -> int:
    """Return how many windows of ``length`` inputs, each with its next-token targets, there are."""
    return (len(tokens) - 1) // length


def windows(tokens: Tensor, index: Sequence[int], length: int) -> Batch:
    """Cut windows out of a token stream.

    Args:
        tokens: The stream, shape (n,), any integer type.
        index: Which windows; window i starts at token ``i * length``.
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
        module: Gives logits (n, t, vocabulary) for tokens (n, t).
        batches: Inputs and targets, each of shape (n, t).
        device: Where ``module`` lives; None for where its first parameter is.
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
    """Seed torch's CPU generator for the body, then put its state back."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the accelerators too.
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def evaluation(module: LightningModule) -> Iterator[None]:
    """Run the body in evaluation mode without gradients; every submodule gets its mode back."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


def device_of(module: LightningModule, device: torch.device | str | None) -> torch.device:
    """Return ``device``, or where the first parameter of ``module`` is."""
    return torch.device(device) if device is not None else next(module.parameters()).device
