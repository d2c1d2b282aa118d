from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from rayhive.errors import RayhiveError
from rayhive.workloads.source_lm import MIN_CORPUS_BYTES, SEPARATOR, SourceLm, read_corpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(200):
        path = tmp_path / f"package{number % 7}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(f"# {number}\n".encode() * 300)
    for skipped in ("test", "site-packages", "package1/tests"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "there.py").write_text("# skipped\n" * 500)
    (tmp_path / "package0" / "notes.txt").write_text("# skipped\n")
    return tmp_path


def files_of(text: bytes) -> set[bytes]:
    return {part.splitlines()[0] for part in text.split(SEPARATOR) if part}


def test_the_corpus_is_split_by_whole_files(folder: Path) -> None:
    train, held_out = map(files_of, read_corpus(10_000_000, folder))
    assert not train & held_out
    assert train | held_out == {f"# {number}".encode() for number in range(200)}
    assert 5 <= len(held_out) <= 40


def test_a_larger_corpus_contains_the_smaller_one(folder: Path) -> None:
    small, large = read_corpus(150_000, folder), read_corpus(250_000, folder)
    assert [len(split) for split in small] == [135_000, 15_000]
    assert all(more.startswith(less) for more, less in zip(large, small, strict=True))


def test_too_little_source_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("x = 1\n")
    with pytest.raises(RayhiveError, match="source_lm found only"):
        read_corpus(MIN_CORPUS_BYTES, tmp_path)


def test_the_standard_library_is_large_enough() -> None:
    train, held_out = read_corpus(MIN_CORPUS_BYTES)
    assert len(train) + len(held_out) == MIN_CORPUS_BYTES
    assert b"import" in train


def test_the_future_is_hidden() -> None:
    workload = SourceLm(width=16, layers=2, heads=2, context=12)
    module = workload.module(seed=0).eval()
    text = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    with torch.no_grad():
        one, other = module(text), module(changed)
    torch.testing.assert_close(one[0, :7], other[0, :7])
    assert not torch.allclose(one[0, 7:], other[0, 7:])


def test_it_learns_more_than_the_frequencies_of_bytes() -> None:
    workload = SourceLm(width=32, layers=1, heads=2, context=32, corpus_bytes=300_000)
    module = workload.module(seed=0)
    optimizer = module.configure_optimizers()
    start = workload.evaluate(module)
    loader = workload.train_loader(peer=0, peers=1, batch_size=32, seed=0)
    for number, batch in enumerate(itertools.islice(loader, 150)):
        optimizer.zero_grad()
        module.training_step(batch, number).backward()
        optimizer.step()
    end = workload.evaluate(module)
    counts = torch.bincount(workload.splits[1].tokens.long(), minlength=256).double()
    share = counts[counts > 0] / counts.sum()
    single = -(share * share.log2()).sum().item()  # entropy of a byte by itself
    assert start["bits_per_byte"] > 7
    assert end["bits_per_byte"] < single
    assert end["loss"] == pytest.approx(end["bits_per_byte"] * math.log(2))
