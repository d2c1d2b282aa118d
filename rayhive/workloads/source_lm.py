"""Small byte-level transformer on Python source code, which every machine has."""

from __future__ import annotations

import math
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from rayhive.workloads.args import WorkloadArgs, parse_args
from rayhive.workloads.base import DataKind, Target
from rayhive.workloads.corpus import MIN_CORPUS_BYTES, read_corpus
from rayhive.workloads.data import (
    Batch,
    Gather,
    IndexedWorkload,
    next_token_loss,
    seeded,
    spread,
    window_count,
    windows,
)

BYTES = 256
EVAL_BATCH = 64


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

    name: ClassVar[str] = "source_lm"
    default_batch_size: ClassVar[int] = 16
    data: DataKind = "real"

    def __init__(self, **args: Any) -> None:
        self.args = parse_args(SourceLmArgs, args)
        self.target = Target("bits_per_byte", self.args.target, "min")

    @cached_property
    def _splits(self) -> tuple[Tensor, Tensor]:
        corpus = read_corpus(self.args.corpus_bytes)
        return (
            torch.frombuffer(bytearray(corpus.train), dtype=torch.uint8),
            torch.frombuffer(bytearray(corpus.held_out), dtype=torch.uint8),
        )

    def train_size(self) -> int:
        """Return the number of windows that are not held out."""
        return window_count(self._splits[0], self.args.context)

    def gather(self, peer: int, seed: int) -> Gather:
        """Return a function that returns (inputs (n, context), targets (n, context))."""
        return partial(windows, self._splits[0], length=self.args.context)

    def module(self, seed: int) -> LightningModule:
        """Return the transformer; see the base class."""
        with seeded(seed):
            return SourceLmModule(self.args)

    def evaluate(
        self, module: LightningModule, device: torch.device | str | None = None
    ) -> dict[str, float]:
        """Return "loss" [nats per byte] and "bits_per_byte" on evenly spaced held-out windows."""
        text, context = self._splits[1], self.args.context
        chosen = spread(window_count(text, context), self.args.eval_windows, EVAL_BATCH)
        loss = next_token_loss(module, (windows(text, part, context) for part in chosen), device)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}
