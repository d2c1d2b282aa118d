"""A three-layer LSTM on WikiText-2, the language task of the PowerSGD paper."""

from __future__ import annotations

from collections import Counter
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from rayhive.errors import ConfigError, Problem
from rayhive.workloads.args import WorkloadArgs, parse_args
from rayhive.workloads.base import DataKind, Device, SchedulerFn, Target
from rayhive.workloads.data import Batch, Gather, IndexedWorkload, Windows, read_files, seeded
from rayhive.workloads.paper import PaperSchedule, rounds_per_pass

PAPER_BATCH = 64
DECAY_PASSES = (60, 80)
DROPOUT = 0.4
CLIP_NORM = 0.4
INIT_RANGE = 0.1
EVAL_BATCH = 32
FOLDER = "wikitext-2"
UNKNOWN = "<unk>"
END = "<eos>"
#: Rules of generated tokens, and streams that are generated in parallel.
RULES = 512
STREAMS = 64
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
        dropout = DROPOUT if args.layers > 1 else 0.0
        self.lstm = nn.LSTM(width, width, args.layers, batch_first=True, dropout=dropout)
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

    name = "lstm_wikitext2"
    default_batch_size = PAPER_BATCH

    def __init__(self, **args: Any) -> None:
        self.args = parse_args(LstmArgs, args)
        self.data: DataKind = "real" if self.args.root is not None else "generated"
        self.target = Target("perplexity", self.args.target or TARGETS[self.data], "min")
        if self.args.root is not None:
            _ = self.splits  # a bad folder is bad input, which is reported at once

    @cached_property
    def splits(self) -> tuple[Windows, Windows]:
        """Windows to train on, and those held out."""
        args, train_samples = self.args, self.args.train_samples
        if args.root is None:
            train_samples, eval_samples = train_samples or 4096, args.eval_samples or 256
            size = args.context * max(train_samples, eval_samples) + 1
            train, held_out = (generate_tokens(seed, size, args.vocabulary) for seed in (0, 1))
            held_out = held_out[: eval_samples * args.context + 1]
        else:
            # held-out windows are chosen at evaluation, evenly spaced over the whole split
            train, held_out = read_wikitext2(args.root, args.split, args.vocabulary, args.lowercase)
            shortest = min(len(train), len(held_out))
            if shortest <= args.context:
                allowed = f"less than the {shortest} tokens of the shorter split"
                raise ConfigError(Problem("workload.args.context", args.context, allowed))
        if train_samples is not None:
            train = train[: train_samples * args.context + 1]
        return Windows(train, args.context), Windows(held_out, args.context)

    def _schedule(self) -> PaperSchedule:
        rounds = rounds_per_pass(self.train_size(), self.args.workers, PAPER_BATCH)
        return PaperSchedule(self.args.workers, rounds, DECAY_PASSES)

    def module(self, seed: int) -> LightningModule:
        """Return the LSTM; see the base class."""
        with seeded(seed):
            return LstmModule(self.args, self._schedule())

    def scheduler_fn(self) -> SchedulerFn:
        """Return a factory of the paper's schedule; see the base class."""
        return self._schedule().scheduler_fn()

    def train_size(self) -> int:
        """Return the number of windows that are not held out."""
        return len(self.splits[0])

    def gather(self, peer: int, seed: int) -> Gather:
        """Return a function that returns (inputs (n, context), targets (n, context))."""
        return self.splits[0].batch

    def evaluate(self, module: LightningModule, device: Device = None) -> dict[str, float]:
        """Return "loss" [nats per token] and "perplexity" on held-out windows."""
        held_out = self.splits[1]
        loss = held_out.loss(module, self.args.eval_samples or len(held_out), EVAL_BATCH, device)
        return {"loss": loss, "perplexity": torch.tensor(loss, dtype=torch.float64).exp().item()}


def read_wikitext2(
    root: str, split: str, vocabulary: int, lowercase: bool
) -> tuple[Tensor, Tensor]:
    """Read ``wiki.train.tokens`` and ``wiki.SPLIT.tokens``.

    Words are separated by blanks, and each line ends in an end-of-sentence token. The most
    frequent words of the training split get numbers; other words become "<unk>".

    Args:
        root: The folder ``wikitext-2``, or its parent folder.
        split: "valid" or "test".
        vocabulary: Largest number of different tokens.
        lowercase: Whether to fold upper case.

    Returns:
        The training split (n,) and the held-out split (m,), int64.

    Raises:
        ConfigError: Files are missing, empty or not text; there is a problem for each.
    """
    names = [f"wiki.{part}.tokens" for part in ("train", split)]
    texts = read_files(root, FOLDER, names, partial(_words, lowercase=lowercase), "WikiText-2")
    numbers = _number_words(texts[names[0]], vocabulary)
    train, held_out = (
        torch.from_numpy(np.array([numbers.get(word, numbers[UNKNOWN]) for word in texts[name]]))
        for name in names
    )
    return train, held_out


def _words(path: Path, lowercase: bool) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError("the file is empty")
    if lowercase:
        text = text.lower()
    # Not splitlines: the text has other characters that are line ends in Unicode.
    lines = text.removesuffix("\n").split("\n")
    return [word for line in lines for word in (*line.split(), END)]


def _number_words(words: list[str], vocabulary: int) -> dict[str, int]:
    counts = Counter(words)
    counts.pop(UNKNOWN, None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate([UNKNOWN, *ranked[: vocabulary - 1]])}


def generate_tokens(seed: int, count: int, vocabulary: int) -> Tensor:
    """Generate a token stream in which half of the tokens can be predicted.

    Token frequencies follow Zipf's law. With probability one half a token is followed by its
    successor under one of 512 fixed rules, which can be learned from little data; else the next
    token is drawn independently.

    Args:
        seed: Determines the stream; the rules depend on the vocabulary alone.
        count: Tokens to generate.
        vocabulary: Different tokens.

    Returns:
        int64, shape (count,).
    """
    rules = min(RULES, vocabulary)
    successor = np.random.default_rng(0).permutation(rules)
    cumulative = np.cumsum(1.0 / (np.arange(vocabulary) + 2.7))
    rng = np.random.default_rng([1, seed])
    length = -(-count // STREAMS)
    stream = np.empty((STREAMS, length), dtype=np.int64)
    current = np.zeros(STREAMS, dtype=np.int64)
    for step in range(length):
        draw = np.searchsorted(cumulative, rng.random(STREAMS) * cumulative[-1], side="right")
        fresh = rng.random(STREAMS) < 0.5
        current = np.where(fresh, np.minimum(draw, vocabulary - 1), successor[current % rules])
        stream[:, step] = current
    return torch.from_numpy(stream.reshape(-1)[:count].copy())
