from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from rayhive.errors import ConfigError
from rayhive.workloads.resnet18_cifar10 import (
    TEST_FILE,
    TRAIN_FILES,
    Resnet18Cifar10,
    crop_and_mirror,
    generate_images,
    normalise,
    read_batch,
)

ROWS = 12


class Python2Pickler(pickle._Pickler):
    """Writes strings as the Python 2 that made the published files did: as plain bytes."""

    dispatch: ClassVar[Any] = dict(pickle._Pickler.dispatch)

    def save_text(self, value: str | bytes) -> None:
        raw = value.encode("ascii") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_text


def batch_content(number: int) -> dict[Any, Any]:
    rng = np.random.default_rng(number)
    return {
        "batch_label": f"training batch {number} of 5",
        "labels": [int(label) for label in rng.integers(0, 10, ROWS)],
        "data": rng.integers(0, 256, (ROWS, 3072), dtype=np.uint8),
        "filenames": [f"image_{row}.png" for row in range(ROWS)],
    }


def write_python2(path: Path, content: object) -> None:
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(content)


def write_python3(path: Path, content: dict[Any, Any]) -> None:
    path.write_bytes(pickle.dumps({key.encode(): value for key, value in content.items()}, 2))


@pytest.fixture(params=[write_python2, write_python3])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write: Callable[[Path, object], None] = request.param
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate((*TRAIN_FILES, TEST_FILE)):
        write(folder / name, batch_content(number))
    return tmp_path


@pytest.mark.parametrize("inside", [False, True])
def test_published_files_are_read_as_they_are(root: Path, inside: bool) -> None:
    given = root / "cifar-10-batches-py" if inside else root
    workload = Resnet18Cifar10(root=str(given), width=2)
    assert workload.data == "real"
    train, test = workload.splits
    assert train.pixels.shape == (5 * ROWS, 3, 32, 32)
    second = batch_content(1)
    assert train.labels[ROWS : 2 * ROWS].tolist() == second["labels"]
    # The first 1024 values are red, row by row.
    assert train.pixels[ROWS + 3, 0, 1, 2] == second["data"][3, 34]
    assert train.pixels[ROWS + 3, 2, 31, 31] == second["data"][3, 3071]
    assert test.labels.tolist() == batch_content(5)["labels"]
    assert workload.evaluate(workload.module(0))["loss"] > 0


def test_fewer_samples_can_be_asked_for(root: Path) -> None:
    workload = Resnet18Cifar10(root=str(root), train_samples=7, eval_samples=3)
    assert [len(split.labels) for split in workload.splits] == [7, 3]


class Command:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"labels": [0]}, "not a dictionary with data and labels"),
        ({"data": np.zeros((1, 3072)), "labels": [0]}, "not an array of bytes"),
        ({"data": np.zeros((1, 100), np.uint8), "labels": [0]}, "3072 columns"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": []}, "not an array of bytes"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "2 numbers from 0 to 9"),
        ({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}, "1 numbers from 0 to 9"),
        ({"data": Command(), "labels": [0]}, "mkdir is not allowed"),
        ([1, 2], "not a dictionary"),
    ],
)
def test_a_file_that_is_not_a_batch_is_refused(
    content: object, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "batch"
    write_python2(path, content)
    with pytest.raises(ValueError, match=complaint):
        read_batch(path)
    assert not (tmp_path / "made-by-a-pickle").exists()


def test_every_bad_file_is_named(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    (folder / "data_batch_2").unlink()
    (folder / "test_batch").write_bytes(b"not a pickle")
    with pytest.raises(ConfigError) as caught:
        Resnet18Cifar10(root=str(root))
    assert {problem.key for problem in caught.value.problems} == {"workload.args.root"}
    text = str(caught.value)
    assert "data_batch_2" in text
    assert "test_batch" in text
    assert "data_batch_1" not in text


def test_a_folder_without_the_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cifar-10-batches-py as published"):
        Resnet18Cifar10(root=str(tmp_path))


def test_generated_images_are_told_apart_by_their_class_pattern() -> None:
    train, test = generate_images(0, 600), generate_images(1, 200)
    assert np.bincount(train.labels).tolist() == [60] * 10
    means = np.stack([train.pixels[train.labels == label].mean(0) for label in range(10)])
    apart = ((test.pixels[:, None].astype(float) - means[None]) ** 2).sum((2, 3, 4))
    assert (apart.argmin(1) == test.labels).mean() > 0.9
    assert not np.array_equal(train.pixels[:200], test.pixels)
    assert np.array_equal(train.pixels, generate_images(0, 600).pixels)


def test_crops_are_windows_of_the_padded_image_and_half_are_mirrored() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(1, 256, (300, 3, 32, 32), dtype=np.uint8)
    cropped = crop_and_mirror(pixels, np.random.default_rng(1))
    assert cropped.shape == pixels.shape
    assert cropped.dtype == np.uint8
    padded = np.pad(pixels, ((0, 0), (0, 0), (4, 4), (4, 4)))
    mirrored, offsets = 0, set()
    for image, result in zip(padded, cropped, strict=True):
        found = [
            (flip, row, column)
            for flip, candidate in ((False, result), (True, result[:, :, ::-1]))
            for row in range(9)
            for column in range(9)
            if np.array_equal(image[:, row : row + 32, column : column + 32], candidate)
        ]
        assert len(found) == 1
        mirrored += found[0][0]
        offsets.add(found[0][1:])
    assert 100 < mirrored < 200
    assert len(offsets) > 60


def test_normalising_takes_out_the_channel_means() -> None:
    mean = torch.tensor([0.4914, 0.4822, 0.4465])
    pixels = (mean * 255).round().to(torch.uint8).view(1, 3, 1, 1).expand(2, 3, 32, 32)
    assert normalise(pixels).abs().max() < 0.02
