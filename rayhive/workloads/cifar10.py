"""CIFAR-10 in its published Python format, and generated images of the same shapes."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rayhive.errors import ConfigError, Problem

FOLDER = "cifar-10-batches-py"
TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
SHAPE = (3, 32, 32)
CLASSES = 10


@dataclass(frozen=True)
class Images:
    """One split.

    Attributes:
        pixels: uint8, shape (n, 3, 32, 32).
        labels: int64, shape (n,), 0 to 9.
    """

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]


def read_cifar10(root: str) -> tuple[Images, Images]:
    """Read the training and the test split.

    Args:
        root: The folder ``cifar-10-batches-py``, or its parent folder.

    Raises:
        ConfigError: Files are missing or not in the published format; there is a problem for each.
    """
    folder = Path(root)
    if (folder / FOLDER).is_dir():
        folder = folder / FOLDER
    problems: list[Problem] = []
    batches: dict[str, Images] = {}
    for name in (*TRAIN_FILES, TEST_FILE):
        try:
            batches[name] = read_batch(folder / name)
        except (OSError, ValueError) as error:
            allowed = f"a folder with {FOLDER} as published; {name}: {error}"
            problems.append(Problem("workload.args.root", root, allowed))
    if problems:
        raise ConfigError(problems)
    train = [batches[name] for name in TRAIN_FILES]
    pixels = np.concatenate([part.pixels for part in train])
    labels = np.concatenate([part.labels for part in train])
    return Images(pixels, labels), batches[TEST_FILE]


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
    if not (
        isinstance(data, np.ndarray)
        and data.dtype == np.uint8
        and data.ndim == 2
        and data.shape[0] > 0
        and data.shape[1] == columns
    ):
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
