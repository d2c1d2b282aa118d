"""A full disk ends a sweep with one message; once there is room, the same command resumes it."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayhive.cluster.node import capabilities
from rayhive.errors import RayhiveError
from rayhive.sweep.run_folder import writable
from rayhive.sweep.signals import Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.unit.sweep_fakes import Recorder, World
from tests.unit.test_sweep_driver import make_study


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a disk of one megabyte."""
    reason = capabilities.here()["mount"]
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run(folder: Path, world: World) -> None:
    study = make_study()
    target = target_at(connect=world.connect)
    with Interruption() as interruption:
        run_sweep(study, folder, Recorder(), interruption, target)


@pytest.mark.parametrize("left", [0, 40, 100, 150])
def test_a_full_disk_ends_the_sweep_with_an_error_that_names_the_folder(
    small_disk: Path, left: int
) -> None:
    """The room ends while the folder, the storage or a replicate is written."""
    filler, folder = small_disk / "filler", small_disk / "run"
    filler.write_bytes(b"x" * (2**20 - left * 1024))
    with pytest.raises(RayhiveError) as caught:
        run(folder, World())
    text = str(caught.value)
    assert str(folder) in text and ("No space left" in text or "full" in text)
    filler.unlink()
    world = World()
    run(folder, world)
    assert len(list(folder.glob("trials/*/*/events.jsonl"))) == 6


def test_a_disk_error_is_found_among_chained_errors() -> None:
    with pytest.raises(RayhiveError, match="No space left"), writable(Path("here")):
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("while clearing up")  # noqa: B904
    with pytest.raises(RayhiveError, match="disk is full"), writable(Path("here")):
        raise RuntimeError("(sqlite3.OperationalError) database or disk is full")
    with pytest.raises(FileNotFoundError), writable(Path("here")):
        raise FileNotFoundError(errno.ENOENT, "another mistake")
