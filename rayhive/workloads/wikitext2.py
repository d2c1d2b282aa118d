"""WikiText-2 in its published format, and generated tokens with a structure to learn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rayhive.errors import ConfigError, Problem

FOLDER = "wikitext-2"
UNKNOWN = "<unk>"
END = "<eos>"
RULES = 512
STREAMS = 64


@dataclass(frozen=True)
class Tokens:
    """Token streams.

    Attributes:
        train: int64, shape (n,).
        held_out: int64, shape (m,).
    """

    train: Tensor
    held_out: Tensor


def read_wikitext2(root: str, split: str, vocabulary: int, lowercase: bool) -> Tokens:
    """Read ``wiki.train.tokens`` and ``wiki.SPLIT.tokens``.

    Words are separated by blanks, and each line ends in an end-of-sentence token. The most
    frequent words of the training split get numbers; other words become "<unk>".

    Args:
        root: The folder ``wikitext-2``, or its parent folder.
        split: "valid" or "test".
        vocabulary: Largest number of different tokens.
        lowercase: Whether to fold upper case.

    Raises:
        ConfigError: Files are missing, empty or not text; there is a problem for each.
    """
    folder = Path(root)
    if (folder / FOLDER).is_dir():
        folder = folder / FOLDER
    problems: list[Problem] = []
    texts: dict[str, list[str]] = {}
    for part in ("train", split):
        name = f"wiki.{part}.tokens"
        try:
            texts[part] = _words((folder / name).read_text(encoding="utf-8"), lowercase)
        except (OSError, ValueError) as error:
            allowed = f"a folder with WikiText-2 as published; {name}: {error}"
            problems.append(Problem("workload.args.root", root, allowed))
    if problems:
        raise ConfigError(problems)
    numbers = _number_words(texts["train"], vocabulary)
    unknown = numbers[UNKNOWN]
    train, held_out = (
        torch.from_numpy(np.array([numbers.get(word, unknown) for word in texts[part]]))
        for part in ("train", split)
    )
    return Tokens(train, held_out)


def _words(text: str, lowercase: bool) -> list[str]:
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
