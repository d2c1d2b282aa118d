"""Handwritten digits with a small CNN: real data, and one core is enough."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from pydantic import Field
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

from rayhive.workloads.args import WorkloadArgs, parse_args
from rayhive.workloads.base import DataKind, Device, Target
from rayhive.workloads.data import Batch, Gather, IndexedWorkload, evaluation, seeded

HELD_OUT_EVERY = 5
LEARNING_RATES = {"adam": 0.002, "sgd": 0.05}


class DigitsArgs(WorkloadArgs):
    """Arguments of the workload ``digits``.

    Attributes:
        target: Held-out accuracy to reach, a fraction.
        width: Channels of the first convolution; the model grows with its square.
        optimizer: "adam", or "sgd" with Nesterov momentum 0.9.
        learning_rate: Constant over the run; None is 0.002 for "adam", 0.05 for "sgd".
    """

    target: float = Field(default=0.97, gt=0, le=1)
    width: int = Field(default=32, ge=4, le=1024, multiple_of=4)
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float | None = Field(default=None, gt=0)


class DigitsModule(LightningModule):
    """Two convolutions and two linear layers over 8x8 images, with group norm.

    Args:
        args: Width and optimizer.
    """

    def __init__(self, args: DigitsArgs) -> None:
        super().__init__()
        width = args.width
        self.args = args
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 4 * width),
            nn.ReLU(),
            nn.Linear(4 * width, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (n, 10) for images of shape (n, 1, 8, 8) in [0, 1]."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of one micro-batch [nats]."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> Optimizer:
        """Return the optimizer, without a scheduler."""
        rate = self.args.learning_rate or LEARNING_RATES[self.args.optimizer]
        if self.args.optimizer == "adam":
            return Adam(self.parameters(), lr=rate)
        return SGD(self.parameters(), lr=rate, momentum=0.9, nesterov=True)


class Digits(IndexedWorkload):
    """Scikit-learn's bundled digits: 1797 grey images of 8x8 pixels in ten classes.

    Every fifth image of each class is held out, so the split is stratified and always the same.

    Args:
        **args: See :class:`DigitsArgs`.

    Raises:
        ConfigError: An argument is unknown or out of range.
    """

    name = "digits"
    default_batch_size = 32
    data: DataKind = "real"

    def __init__(self, **args: Any) -> None:
        self.args = parse_args(DigitsArgs, args)
        self.target = Target("accuracy", self.args.target, "max")

    @cached_property
    def splits(self) -> tuple[Batch, Batch]:
        """Images (n, 1, 8, 8) in [0, 1] and labels (n,), to train on and held out."""
        bunch = load_digits()
        images = torch.as_tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.as_tensor(bunch.target, dtype=torch.int64)
        seen = F.one_hot(labels, 10).cumsum(0).gather(1, labels.unsqueeze(1)).squeeze(1)
        held_out = seen % HELD_OUT_EVERY == 0
        return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])

    def train_size(self) -> int:
        """Return the number of images that are not held out."""
        return len(self.splits[0][1])

    def gather(self, peer: int, seed: int) -> Gather:
        """Return a function that returns (images (n, 1, 8, 8), labels (n,)); see the base class."""
        images, labels = self.splits[0]
        return lambda index: (images[index], labels[index])

    def module(self, seed: int) -> LightningModule:
        """Return the CNN; see the base class."""
        with seeded(seed):
            return DigitsModule(self.args)

    def evaluate(self, module: LightningModule, device: Device = None) -> dict[str, float]:
        """Return "loss" [nats] and "accuracy" [fraction] on the held-out images."""
        with evaluation(module, device) as where:
            images, labels = (tensor.to(where) for tensor in self.splits[1])
            logits = module(images).float()
        return {
            "loss": F.cross_entropy(logits, labels).item(),
            "accuracy": (logits.argmax(1) == labels).float().mean().item(),
        }
