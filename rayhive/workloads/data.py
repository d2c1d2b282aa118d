"""Building blocks of workloads: shards, endless loaders, data sets, and pure evaluation."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from rayhive.errors import ConfigError, Problem
from rayhive.workloads.base import Device, Workload

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

Batch = tuple[Tensor, Tensor]
Gather = Callable[[Sequence[int]], Batch]
T = TypeVar("T")


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


@dataclass(frozen=True)
class Windows:
    """Windows of a token stream; one window with its next-token targets is one sample.

    Attributes:
        tokens: The stream, shape (n,), any integer type.
        length: Tokens in one window.
    """

    tokens: Tensor
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def batch(self, index: Sequence[int]) -> Batch:
        """Return inputs and targets of windows, which are one token later.

        Args:
            index: Numbers of the windows; window i starts at token ``i * length``.

        Returns:
            Two int64 tensors of shape (len(index), length).
        """
        start = torch.as_tensor(index).unsqueeze(1) * self.length
        span = self.tokens[start + torch.arange(self.length + 1)].long()
        return span[:, :-1].contiguous(), span[:, 1:].contiguous()

    def loss(self, module: LightningModule, count: int, batch: int, device: Device) -> float:
        """Return the mean cross-entropy over evenly spaced windows [nats per token].

        Args:
            module: Returns logits (n, t, vocabulary) for tokens (n, t).
            count: Number of windows; all of them if there are fewer.
            batch: Windows in one forward pass.
            device: Device of ``module``; None for that of its first parameter.
        """
        total, tokens = 0.0, 0
        with evaluation(module, device) as where:
            for index in spread(len(self), count, batch):
                inputs, targets = (part.to(where) for part in self.batch(index))
                logits = module(inputs).float().flatten(0, 1)
                total += F.cross_entropy(logits, targets.flatten(), reduction="sum").item()
                tokens += targets.numel()
        return total / tokens


def spread(size: int, count: int, batch: int) -> list[list[int]]:
    """Return at most ``count`` indices, evenly spaced over ``range(size)``, in batches."""
    count = min(count, size)
    index = [number * size // count for number in range(count)]
    return [index[first : first + batch] for first in range(0, count, batch)]


def read_files(
    root: str, folder: str, names: Iterable[str], read: Callable[[Path], T], about: str
) -> dict[str, T]:
    """Read the files of a published data set.

    Args:
        root: The folder ``folder``, or its parent folder.
        folder: Name of the folder in the published archive.
        names: Names of the files.
        read: Returns the content of a file.
        about: The data set, for the error text.

    Returns:
        Name of a file -> its content.

    Raises:
        ConfigError: Files are missing or not in the published format; there is a problem for each.
    """
    path = Path(root)
    if (path / folder).is_dir():
        path /= folder
    found: dict[str, T] = {}
    problems: list[Problem] = []
    for name in names:
        try:
            found[name] = read(path / name)
        except (OSError, ValueError) as error:
            allowed = f"a folder with {about} as published; {name}: {error}"
            problems.append(Problem("workload.args.root", root, allowed))
    if problems:
        raise ConfigError(problems)
    return found


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator for the body, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would reseed the accelerators too.
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def evaluation(module: LightningModule, device: Device = None) -> Iterator[torch.device]:
    """Run the body in evaluation mode without gradients; restore the mode of every submodule.

    Args:
        module: The module.
        device: Device of ``module``; None for that of its first parameter.

    Yields:
        The device.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield next(module.parameters()).device if device is None else torch.device(device)
    finally:
        for part, training in modes:
            part.training = training
