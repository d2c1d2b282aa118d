"""ResNet-18 on CIFAR-10, the image task of the PowerSGD paper."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from rayhive.workloads.args import WorkloadArgs, parse_args
from rayhive.workloads.base import DataKind, Device, SchedulerFn, Target
from rayhive.workloads.data import Batch, Gather, IndexedWorkload, evaluation, read_files, seeded
from rayhive.workloads.paper import PaperSchedule, rounds_per_pass

PAPER_BATCH = 128
DECAY_PASSES = (150, 250)
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
MEAN = (0.4914, 0.4822, 0.4465)
SPREAD = (0.2023, 0.1994, 0.2010)
EVAL_BATCH = 250
FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
SHAPE = (3, 32, 32)
CLASSES = 10


class Resnet18Args(WorkloadArgs):
    """Arguments of the workload ``resnet18_cifar10``.

    Attributes:
        target: Held-out accuracy to reach, a fraction. The default is chosen by rayhive.
        root: Folder with ``cifar-10-batches-py``; without it the images are generated.
        workers: The paper's number of workers: a round has 128 samples for each. The learning rate
            rises to that of one worker times this number. The paper has 16.
        learning_rate: Learning rate of one worker; the paper has 0.1.
        width: Channels of the first stage; the paper's model has 64.
        augment: Random crops and mirror images while training, as in the paper's code.
        train_samples: Images to train on; None is all of them, or 4096 generated ones.
        eval_samples: Held-out images; None is all of them, or 512 generated ones.
    """

    target: float = Field(default=0.9, gt=0, le=1)
    root: str | None = None
    workers: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=0.1, gt=0)
    width: int = Field(default=64, ge=1, le=1024)
    augment: bool = True
    train_samples: int | None = Field(default=None, ge=1)
    eval_samples: int | None = Field(default=None, ge=1)


class Images(NamedTuple):
    """One split.

    Attributes:
        pixels: uint8, shape (n, 3, 32, 32).
        labels: int64, shape (n,), 0 to 9.
    """

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, h / stride, w / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def batch_norms(module: nn.Module) -> Iterable[nn.BatchNorm2d]:
    """Yield the batch-norm layers of a module, in order."""
    return (part for part in module.modules() if isinstance(part, nn.BatchNorm2d))


class Resnet18Module(LightningModule):
    """ResNet-18 for 32x32 images: a 3x3 stem without pooling, four stages of two blocks.

    11,173,962 parameters at the default width.

    The paper's published settings: SGD with Nesterov momentum 0.9; weight decay 1e-4 except on
    batch norm's parameters; learning rate 0.1 per worker, five passes of warm-up to ``workers``
    times that, divided by ten at passes 150 and 250 (of 300); 128 samples per worker. There is
    one difference: the momentum of the paper's Algorithm 2 steps by the gradient plus the whole
    new momentum, while torch's, which is used here, takes 0.9 of it.

    Args:
        args: Width and learning rate.
        schedule: Factor on the learning rate, by round.
    """

    def __init__(self, args: Resnet18Args, schedule: PaperSchedule) -> None:
        super().__init__()
        self.args = args
        self.schedule = schedule
        width = args.width
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        inputs = width
        for stage in range(4):
            outputs = width * 2**stage
            layers += [
                BasicBlock(inputs, outputs, stride=1 if stage == 0 else 2),
                BasicBlock(outputs, outputs, stride=1),
            ]
            inputs = outputs
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
        self.net = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (n, 10) for normalised images (n, 3, 32, 32)."""
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of one micro-batch [nats]."""
        images, labels = batch
        return F.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return SGD with the paper's settings and its schedule, one step a round."""
        plain = [parameter for norm in batch_norms(self) for parameter in norm.parameters()]
        exempt = {id(parameter) for parameter in plain}
        decayed = [parameter for parameter in self.parameters() if id(parameter) not in exempt]
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = SGD(groups, lr=self.args.learning_rate, momentum=MOMENTUM, nesterov=True)
        return self.schedule.applied_to(optimizer)


class Resnet18Cifar10(IndexedWorkload):
    """The PowerSGD paper's ResNet-18 on CIFAR-10, or on generated images of the same shapes.

    Batch norm's running statistics are buffers: each peer keeps its own, from its own samples,
    unless :meth:`extra_tensors` are averaged.

    Args:
        **args: See :class:`Resnet18Args`.

    Raises:
        ConfigError: An argument is unknown or out of range, or ``root`` does not hold CIFAR-10.
    """

    name = "resnet18_cifar10"
    default_batch_size = PAPER_BATCH

    def __init__(self, **args: Any) -> None:
        self.args = parse_args(Resnet18Args, args)
        self.target = Target("accuracy", self.args.target, "max")
        self.data: DataKind = "real" if self.args.root is not None else "generated"
        if self.args.root is not None:
            _ = self.splits  # a bad folder is bad input, which is reported at once

    @cached_property
    def splits(self) -> tuple[Images, Images]:
        """Images to train on, and those held out."""
        args = self.args
        if args.root is None:
            return (
                generate_images(0, args.train_samples or 4096),
                generate_images(1, args.eval_samples or 512),
            )
        (pixels, labels), test = read_cifar10(args.root)
        train = Images(pixels[: args.train_samples], labels[: args.train_samples])
        return train, Images(test.pixels[: args.eval_samples], test.labels[: args.eval_samples])

    def _schedule(self) -> PaperSchedule:
        rounds = rounds_per_pass(self.train_size(), self.args.workers, PAPER_BATCH)
        return PaperSchedule(self.args.workers, rounds, DECAY_PASSES)

    def module(self, seed: int) -> LightningModule:
        """Return the ResNet; see the base class."""
        with seeded(seed):
            return Resnet18Module(self.args, self._schedule())

    def scheduler_fn(self) -> SchedulerFn:
        """Return a factory of the paper's schedule; see the base class."""
        return self._schedule().scheduler_fn()

    def train_size(self) -> int:
        """Return the number of images to train on."""
        return len(self.splits[0].labels)

    def gather(self, peer: int, seed: int) -> Gather:
        """Return a function that returns (images (n, 3, 32, 32), labels (n,))."""
        images = self.splits[0]
        # One random stream per peer, so that crops differ between peers.
        rng = np.random.default_rng([seed, peer, 1]) if self.args.augment else None

        def gather(index: Sequence[int]) -> Batch:
            pixels = images.pixels[index]
            if rng is not None:
                pixels = crop_and_mirror(pixels, rng)
            return normalise(torch.from_numpy(pixels)), torch.from_numpy(images.labels[index])

        return gather

    def evaluate(self, module: LightningModule, device: Device = None) -> dict[str, float]:
        """Return "loss" [nats] and "accuracy" [fraction] on the held-out images."""
        images = self.splits[1]
        count = len(images.labels)
        loss, right = 0.0, 0
        with evaluation(module, device) as where:
            for first in range(0, count, EVAL_BATCH):
                part = slice(first, first + EVAL_BATCH)
                labels = torch.from_numpy(images.labels[part]).to(where)
                logits = module(normalise(torch.from_numpy(images.pixels[part]).to(where))).float()
                loss += F.cross_entropy(logits, labels, reduction="sum").item()
                right += int((logits.argmax(1) == labels).sum())
        return {"loss": loss / count, "accuracy": right / count}

    def extra_tensors(self, module: LightningModule) -> list[Tensor]:
        """Return batch norm's running means and variances, layer by layer."""
        norms = batch_norms(module)
        tensors = [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var)]
        return [tensor for tensor in tensors if tensor is not None]


def normalise(pixels: Tensor) -> Tensor:
    """Map bytes (n, 3, 32, 32) to floats, standardised by the channel means of CIFAR-10."""
    mean, spread = (
        torch.tensor(values, device=pixels.device).view(1, 3, 1, 1) for values in (MEAN, SPREAD)
    )
    return (pixels.float() / 255 - mean) / spread


def crop_and_mirror(pixels: np.ndarray[Any, Any], rng: np.random.Generator) -> Any:
    """Return a random 32x32 crop of each image padded by 4 zeros, mirrored half of the time."""
    n, _, height, width = pixels.shape
    padded = np.pad(pixels, ((0, 0), (0, 0), (4, 4), (4, 4)))
    rows = rng.integers(0, 9, n)[:, None] + np.arange(height)
    columns = rng.integers(0, 9, n)[:, None] + np.arange(width)
    mirror = rng.random(n) < 0.5
    columns[mirror] = columns[mirror, ::-1]
    image = np.arange(n)[:, None, None]
    # Advanced indices on both sides of a slice: their axes come first, the channels last.
    cropped = padded[image, :, rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(cropped.transpose(0, 3, 1, 2))


def read_cifar10(root: str) -> tuple[Images, Images]:
    """Read the training and the test split.

    Args:
        root: The folder ``cifar-10-batches-py``, or its parent folder.

    Raises:
        ConfigError: Files are missing or not in the published format; there is a problem for each.
    """
    batches = read_files(root, FOLDER, (*TRAIN_FILES, TEST_FILE), read_batch, FOLDER)
    pixels, labels = zip(*(batches[name] for name in TRAIN_FILES), strict=True)
    return Images(np.concatenate(pixels), np.concatenate(labels)), batches[TEST_FILE]


def read_batch(path: Path) -> Images:
    """Read one pickled batch: ``data`` (n, 3072) uint8, channel-major, and ``labels``.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a batch as published, or unpickling it needs more than arrays.
    """
    try:
        content = _ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except OSError:
        raise
    except Exception as error:  # a broken pickle can raise nearly anything
        raise ValueError(f"not a readable pickle ({error})") from None
    if not isinstance(content, dict) or not {b"data", b"labels"} <= content.keys():
        raise ValueError("not a dictionary with data and labels")
    data, labels = content[b"data"], content[b"labels"]
    columns = SHAPE[0] * SHAPE[1] * SHAPE[2]
    is_bytes = isinstance(data, np.ndarray) and data.dtype == np.uint8
    if not (is_bytes and data.shape[1:] == (columns,) and len(data)):
        raise ValueError(f"data is not an array of bytes with {columns} columns")
    if not (
        isinstance(labels, list)
        and len(labels) == len(data)
        and all(isinstance(label, int) and 0 <= label < CLASSES for label in labels)
    ):
        raise ValueError(f"labels are not {len(data)} numbers from 0 to {CLASSES - 1}")
    return Images(data.reshape(-1, *SHAPE), np.asarray(labels, dtype=np.int64))


def _encode(text: str, encoding: str) -> bytes:
    # Python 3 writes bytes in the old protocol as latin1 text; no other codec is needed.
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec {encoding!r} is not allowed")
    return text.encode(encoding)


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickler that builds plain values and numpy arrays and refuses everything else."""

    _reconstruct = np.ndarray((0,)).__reduce__()[0]
    _allowed = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed") from None


def generate_images(seed: int, count: int) -> Images:
    """Generate images whose classes a network can learn.

    An image is the sum of the colour of its class, which cropping and mirroring preserve, a random
    pattern of 4x4 colour patches of its class, which is harder to learn, and stronger noise. Labels
    are balanced and in random order.

    Args:
        seed: Determines the noise and the labels; the patterns are always the same.
        count: Number of images.
    """
    # The noise has three times the spread of the patterns: no single pixel identifies a class.
    fixed = np.random.default_rng(0)
    patterns = fixed.normal(0, 20, (CLASSES, 3, 1, 1)) + fixed.normal(0, 20, (CLASSES, 3, 8, 8))
    patterns = patterns.repeat(4, axis=2).repeat(4, axis=3).astype(np.float32)
    rng = np.random.default_rng([1, seed])
    labels = rng.permutation(np.arange(count) % CLASSES)
    pixels = np.empty((count, *SHAPE), dtype=np.uint8)
    for first in range(0, count, 1024):
        part = slice(first, first + 1024)
        noise = rng.standard_normal((len(labels[part]), *SHAPE), dtype=np.float32)
        values = 127.5 + patterns[labels[part]] + 60.0 * noise
        pixels[part] = values.clip(0, 255).astype(np.uint8)
    return Images(pixels, labels.astype(np.int64))
