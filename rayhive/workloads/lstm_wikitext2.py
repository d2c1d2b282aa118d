"""A three-layer LSTM on WikiText-2, the language task of the PowerSGD paper."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from rayhive.errors import ConfigError, Problem
from rayhive.workloads.args import WorkloadArgs, parse_args
from rayhive.workloads.base import DataKind, SchedulerFn, Target
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
from rayhive.workloads.paper import PaperSchedule, rounds_per_pass
from rayhive.workloads.wikitext2 import Tokens, generate_tokens, read_wikitext2

PAPER_BATCH = 64
DECAY_PASSES = (60, 80)
DROPOUT = 0.4
CLIP_NORM = 0.4
INIT_RANGE = 0.1
EVAL_BATCH = 32
TARGETS: dict[DataKind, float] = {"real": 100.0, "generated": 2000.0}


class LstmArgs(WorkloadArgs):
    """Arguments of the workload ``lstm_wikitext2``.

    Attributes:
        target: Held-out perplexity to reach; None is 100 on real data and 2000 on generated
            tokens, both chosen by rayhive.
        root: Folder with ``wiki.train.tokens`` and its siblings, or the parent folder of such a
            ``wikitext-2``. Without it the tokens are generated.
        split: The held-out split; the paper's code measures on "valid".
        workers: The paper's number of workers: a round has 64 windows for each. The learning rate
            rises to that of one worker times this number. The paper has 16.
        learning_rate: Learning rate of one worker; the paper has 1.25.
        vocabulary: Rows of the embedding; the paper's model has 28,869.
        lowercase: Fold upper case, as the paper's code does.
        width: Size of embedding and state; the paper has 650.
        layers: LSTM layers; the paper has 3.
        context: Tokens in one window, which is one sample; the paper unrolls 30.
        train_samples: Windows to train on; None is all of them, or 4096 generated ones.
        eval_samples: Held-out windows; None is all of them, or 256 generated ones.
    """

    target: float | None = Field(default=None, gt=1)
    root: str | None = None
    split: Literal["valid", "test"] = "valid"
    workers: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=1.25, gt=0)
    vocabulary: int = Field(default=28_869, ge=2)
    lowercase: bool = True
    width: int = Field(default=650, ge=1, le=8192)
    layers: int = Field(default=3, ge=1, le=16)
    context: int = Field(default=30, ge=2, le=4096)
    train_samples: int | None = Field(default=None, ge=1)
    eval_samples: int | None = Field(default=None, ge=1)


class LstmModule(LightningModule):
    """Embedding, LSTM layers and a decoder that shares the embedding's matrix.

    28,949,319 parameters by default: 28,869 x 650 for the embedding, 28,869 biases of the
    decoder, and 3 layers of 2 x 2,600 x 650 weights and 2 x 2,600 biases.

    The paper's published settings and code: SGD without momentum or weight decay; learning rate
    1.25 per worker, five passes of warm-up to ``workers`` times that, divided by ten at passes 60
    and 80 (of 90); 64 windows of 30 tokens per worker; dropout 0.4; gradients of each worker's
    batch clipped to norm 0.4. There are two differences. The paper carries the state from window
    to window; here windows are shuffled and each starts from zero. The paper's momentum code, run
    with momentum 0, steps by twice the gradient; ``learning_rate: 2.5`` takes the same steps.

    Args:
        args: Sizes and learning rate.
        schedule: Factor on the learning rate, by round.
    """

    def __init__(self, args: LstmArgs, schedule: PaperSchedule) -> None:
        super().__init__()
        self.args = args
        self.schedule = schedule
        width = args.width
        self.embed = nn.Embedding(args.vocabulary, width)
        self.lstm = nn.LSTM(
            width,
            width,
            args.layers,
            batch_first=True,
            dropout=DROPOUT if args.layers > 1 else 0.0,
        )
        self.drop = nn.Dropout(DROPOUT)
        self.decode_bias = nn.Parameter(torch.zeros(args.vocabulary))
        nn.init.uniform_(self.embed.weight, -INIT_RANGE, INIT_RANGE)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return next-token logits (n, t, vocabulary) for tokens (n, t)."""
        states, _ = self.lstm(self.drop(self.embed(inputs)))
        return F.linear(self.drop(states), self.embed.weight, self.decode_bias)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of one micro-batch [nats per token]."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip a gradient to the paper's norm, unless the Trainer sets another one."""
        self.clip_gradients(
            optimizer,
            gradient_clip_val=CLIP_NORM if gradient_clip_val is None else gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm or "norm",
        )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return SGD with the paper's settings, and its schedule with one step per round."""
        return self.schedule.applied_to(SGD(self.parameters(), lr=self.args.learning_rate))


class LstmWikitext2(IndexedWorkload):
    """The PowerSGD paper's LSTM on WikiText-2, or on generated tokens of the same vocabulary.

    The published files have 33,278 different tokens. The paper's code folds case and tokenises
    again, which leaves 28,869, the size of its model. Here case is folded and the 28,869 most
    frequent words are kept, so the model and its bytes are those of the paper.

    Args:
        **args: See :class:`LstmArgs`.

    Raises:
        ConfigError: An argument is unknown or out of range, or ``root`` does not hold WikiText-2.
    """

    name: ClassVar[str] = "lstm_wikitext2"
    default_batch_size: ClassVar[int] = PAPER_BATCH

    def __init__(self, **args: Any) -> None:
        self.args = parse_args(LstmArgs, args)
        self.data: DataKind = "real" if self.args.root is not None else "generated"
        self.target = Target("perplexity", self.args.target or TARGETS[self.data], "min")
        if self.args.root is not None:
            _ = self._splits  # a bad folder is bad input, which is reported at once

    @cached_property
    def _splits(self) -> Tokens:
        args = self.args
        train_samples, eval_samples = args.train_samples, args.eval_samples
        if args.root is None:
            train_samples, eval_samples = train_samples or 4096, eval_samples or 256
            size = args.context * max(train_samples, eval_samples) + 1
            tokens = Tokens(*(generate_tokens(seed, size, args.vocabulary) for seed in (0, 1)))
        else:
            tokens = read_wikitext2(args.root, args.split, args.vocabulary, args.lowercase)
            shortest = min(len(tokens.train), len(tokens.held_out))
            if shortest <= args.context:
                allowed = f"less than the {shortest} tokens of the shorter split"
                raise ConfigError(Problem("workload.args.context", args.context, allowed))
        return Tokens(
            _first(tokens.train, train_samples, args.context),
            # Held-out windows are chosen at evaluation, evenly spaced over the whole split.
            tokens.held_out if args.root else _first(tokens.held_out, eval_samples, args.context),
        )

    def _schedule(self) -> PaperSchedule:
        rounds = rounds_per_pass(self.train_size(), self.args.workers, PAPER_BATCH)
        return PaperSchedule(self.args.workers, rounds, DECAY_PASSES)

    def module(self, seed: int) -> LightningModule:
        """Return the LSTM; see the base class."""
        schedule = self._schedule()
        with seeded(seed):
            return LstmModule(self.args, schedule)

    def scheduler_fn(self) -> SchedulerFn:
        """Return a factory of the paper's schedule; see the base class."""
        return self._schedule().scheduler_fn()

    def train_size(self) -> int:
        """Return the number of windows that are not held out."""
        return window_count(self._splits.train, self.args.context)

    def gather(self, peer: int, seed: int) -> Gather:
        """Return a function that returns (inputs (n, context), targets (n, context))."""
        return partial(windows, self._splits.train, length=self.args.context)

    def evaluate(
        self, module: LightningModule, device: torch.device | str | None = None
    ) -> dict[str, float]:
        """Return "loss" [nats per token] and "perplexity" on held-out windows."""
        tokens, context = self._splits.held_out, self.args.context
        size = window_count(tokens, context)
        chosen = spread(size, self.args.eval_samples or size, EVAL_BATCH)
        loss = next_token_loss(module, (windows(tokens, part, context) for part in chosen), device)
        return {"loss": loss, "perplexity": torch.tensor(loss, dtype=torch.float64).exp().item()}


def _first(tokens: Tensor, samples: int | None, context: int) -> Tensor:
    return tokens if samples is None else tokens[: samples * context + 1]
