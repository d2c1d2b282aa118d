from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rayhive.errors import ConfigError
from rayhive.workloads.lstm_wikitext2 import LstmWikitext2, generate_tokens, read_wikitext2

TRAIN = " \n = Valkyria Chronicles III = \n \n The game , the <unk> and THE sequel @-@ \n"
VALID = " \n = Homarus = \n the lobster and the game \n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for part, text in {"train": TRAIN, "valid": VALID, "test": VALID}.items():
        (folder / f"wiki.{part}.tokens").write_text(text, encoding="utf-8")
    return tmp_path


def test_lines_become_tokens_and_rare_words_unknown(root: Path) -> None:
    train, held_out = read_wikitext2(str(root), "valid", vocabulary=4, lowercase=True)
    # 0 is <unk>; then by frequency: <eos> 4, the 3, = 2.
    assert held_out.tolist() == [1, 3, 0, 3, 1, 2, 0, 0, 2, 0, 1]
    assert train.tolist() == [1, 3, 0, 0, 0, 3, 1, 1, 2, 0, 0, 2, 0, 0, 2, 0, 0, 1]


def test_case_can_be_kept(root: Path) -> None:
    folded, _ = read_wikitext2(str(root), "test", vocabulary=100, lowercase=True)
    kept, _ = read_wikitext2(str(root / "wikitext-2"), "test", vocabulary=100, lowercase=False)
    assert kept.max() == folded.max() + 2  # The, the and THE are three


def test_a_workload_trains_on_the_published_files(root: Path) -> None:
    workload = LstmWikitext2(root=str(root), context=5, vocabulary=16, width=4)
    assert workload.data == "real"
    inputs, targets = next(iter(workload.train_loader(peer=0, peers=1, batch_size=3, seed=0)))
    assert inputs.shape == targets.shape == (3, 5)
    train, _ = workload.splits
    # Three windows of five fit in the 18 tokens, two in the 11 that are held out.
    assert sorted(inputs[:, 0].tolist()) == sorted(train.tokens[[0, 5, 10]].tolist())
    assert workload.evaluate(workload.module(0))["perplexity"] == pytest.approx(16, rel=0.5)


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe\x00"])
def test_a_bad_file_is_named(root: Path, part: str, content: bytes | None) -> None:
    path = root / "wikitext-2" / f"wiki.{part}.tokens"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"workload\.args\.root: .*wiki\.{part}\.tokens"):
        LstmWikitext2(root=str(root), split="test", context=5)


def test_a_context_longer_than_the_text_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload\.args\.context: 11 .* 11 tokens"):
        LstmWikitext2(root=str(root), context=11)


def test_generated_tokens_follow_their_rule_half_of_the_time() -> None:
    tokens = generate_tokens(0, 64 * 400, vocabulary=5000).numpy()
    assert tokens.min() >= 0
    assert tokens.max() < 5000
    successor = np.random.default_rng(0).permutation(512)
    follows = tokens[1:] == successor[tokens[:-1] % 512]
    assert 0.48 < follows.mean() < 0.53
    counts = np.bincount(tokens[1:][~follows], minlength=5000)
    assert counts[0] > counts[10] > counts[300], "fresh draws thin out by rank"
    assert not np.array_equal(tokens, generate_tokens(1, 64 * 400, 5000).numpy())
