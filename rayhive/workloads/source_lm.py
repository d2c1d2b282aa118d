"""Small byte-level transformer on Python source code, which every machine has."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from rayhive.errors import RayhiveError
from rayhive.workloads.args import WorkloadArgs, parse_args
from rayhive.workloads.base import DataKind, Device, Target
from rayhive.workloads.data import Batch, Gather, IndexedWorkload, Windows, seeded

BYTES = 256
EVAL_BATCH = 64
MIN_CORPUS_BYTES = 100_000
HELD_OUT_SHARE = 0.1
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
# End of a file in the stream; source text contains no zero byte.
SEPARATOR = b"\0"


class SourceLmArgs(WorkloadArgs):
    """Arguments of the workload ``source_lm``.

    Attributes:
        target: Held-out bits per byte to reach.
        width: Size of the residual stream.
        layers: Transformer blocks.
        heads: Attention heads; a divisor of ``width``.
        context: Bytes in one window, which is one sample.
        learning_rate: Learning rate of AdamW, constant over the run.
        corpus_bytes: Source text to read, both splits together [bytes].
        eval_windows: Windows of the held-out split in an evaluation.
    """

    target: float = Field(default=3.5, gt=0, le=8)
    width: int = Field(default=128, ge=8, le=4096)
    layers: int = Field(default=3, ge=1, le=64)
    heads: int = Field(default=4, ge=1, le=64)
    context: int = Field(default=64, ge=8, le=4096)
    learning_rate: float = Field(default=0.002, gt=0)
    corpus_bytes: int = Field(default=4_000_000, ge=MIN_CORPUS_BYTES)
    eval_windows: int = Field(default=256, ge=1)

    @field_validator("heads")
    @classmethod
    def _divides_width(cls, heads: int, info: ValidationInfo) -> int:
        width = info.data.get("width")
        if width is not None and width % heads:
            raise ValueError(f"a divisor of width ({width})")
        return heads


class Block(nn.Module):
    """Pre-norm transformer block: causal self-attention, then an MLP of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map a residual stream (n, t, width) to the next one."""
        n, t, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(n, t, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, t, width))
        x = x + self.mlp(self.norm_mlp(x))
        return x


class SourceLmModule(LightningModule):
    """Causal byte-level transformer; input and output embeddings are separate matrices.

    Args:
        args: Sizes and learning rate.
    """

    def __init__(self, args: SourceLmArgs) -> None:
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(BYTES, args.width)
        self.position = nn.Embedding(args.context, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, args.heads) for _ in range(args.layers)))
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, BYTES)
        # Large enough that bigrams are learned quickly; positions start as a small correction.
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.position.weight, std=0.05)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return next-byte logits (n, t, 256) for bytes (n, t)."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.blocks(self.embed(inputs) + self.position(places))
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of one micro-batch [nats per byte]."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Optimizer:
        """Return AdamW, without a scheduler."""
        return AdamW(
            self.parameters(), lr=self.args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )


class SourceLm(IndexedWorkload):
    """Language model of the source code of the Python standard library, one byte per token.

    A sample is one window of ``context`` bytes. Whole files are held out. The text is that of the
    running interpreter: peers with different Python versions read slightly different corpora.

    Args:
        **args: See :class:`SourceLmArgs`.

    Raises:
        ConfigError: An argument is unknown or out of range.
    """

    name = "source_lm"
    default_batch_size = 16
    data: DataKind = "real"

    def __init__(self, **args: Any) -> None:
        self.args = parse_args(SourceLmArgs, args)
        self.target = Target("bits_per_byte", self.args.target, "min")

    @cached_property
    def splits(self) -> tuple[Windows, Windows]:
        """Windows to train on, and those held out."""
        train, held_out = (
            Windows(torch.frombuffer(bytearray(text), dtype=torch.uint8), self.args.context)
            for text in read_corpus(self.args.corpus_bytes)
        )
        return train, held_out

    def train_size(self) -> int:
        """Return the number of windows that are not held out."""
        return len(self.splits[0])

    def gather(self, peer: int, seed: int) -> Gather:
        """Return a function that returns (inputs (n, context), targets (n, context))."""
        return self.splits[0].batch

    def module(self, seed: int) -> LightningModule:
        """Return the transformer; see the base class."""
        with seeded(seed):
            return SourceLmModule(self.args)

    def evaluate(self, module: LightningModule, device: Device = None) -> dict[str, float]:
        """Return "loss" [nats per byte] and "bits_per_byte" on evenly spaced held-out windows."""
        loss = self.splits[1].loss(module, self.args.eval_windows, EVAL_BATCH, device)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}


def read_corpus(limit: int, folder: Path | None = None) -> tuple[bytes, bytes]:
    """Read ``*.py`` files until there are ``limit`` bytes.

    Files are read in the order of a hash of their path within the folder. This order mixes
    packages, and is the same on every machine with the same Python. Another part of the hash
    determines whether a file is held out, so a larger ``limit`` never moves a file between splits.

    Args:
        limit: Bytes to read, both splits together. Each split is cut at its share of the limit.
        folder: Folder to read; by default the standard library of the running interpreter.

    Returns:
        The training split, and the held-out split of about a tenth of the whole.

    Raises:
        RayhiveError: The folder holds too little source text, for example because a distribution
            ships the standard library compiled or zipped.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    splits = bytearray(), bytearray()
    most = round(limit * (1 - HELD_OUT_SHARE)), round(limit * HELD_OUT_SHARE)
    for digest, path in sorted(_source_files(folder)):
        split = int(digest[-1] < 256 * HELD_OUT_SHARE)
        if len(splits[split]) < most[split]:
            splits[split].extend(path.read_bytes() + SEPARATOR)
    train, held_out = (bytes(text[:room]) for text, room in zip(splits, most, strict=True))
    if min(len(train), 9 * len(held_out)) < MIN_CORPUS_BYTES // 2:
        raise RayhiveError(
            f"source_lm found only {len(train)} bytes of Python source to train on and "
            f"{len(held_out)} to hold out under {folder}"
        )
    return train, held_out


def _source_files(folder: Path) -> Iterator[tuple[bytes, Path]]:
    """Yield each source file with the hash of its path."""
    for path in folder.rglob("*.py"):
        within = path.relative_to(folder)
        if not SKIPPED_FOLDERS.intersection(within.parts):
            yield hashlib.sha256(within.as_posix().encode()).digest(), path
