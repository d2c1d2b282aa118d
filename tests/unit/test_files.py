"""Files that are replaced as a whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayhive.errors import ConfigError
from rayhive.files import check_writable, is_unfinished, replaced, write_atomically


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_with_its_permissions(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "state.json"
    for text in ("old", "näw"):
        write_atomically(path, text, durable=durable, mode=0o600)
        assert path.read_text(encoding="utf-8") == text
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["state.json"]


def test_only_a_durable_file_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    write_atomically(tmp_path / "a", "text", durable=False)
    assert not synced
    write_atomically(tmp_path / "a", "text")
    assert len(synced) == 1


def test_a_failed_replacement_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomically(path, "old")
    with pytest.raises(RuntimeError), replaced(path) as new:
        assert is_unfinished(new) and not is_unfinished(path)
        new.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["state.json"]


def test_a_symbolic_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    file, link = tmp_path / "there" / "report.html", tmp_path / "link"
    file.parent.mkdir()
    link.symlink_to(file)
    for text in ("new", "newer"):  # at first it leads nowhere
        check_writable(link, "--out")
        write_atomically(link, text)
        assert link.is_symlink() and file.read_text() == text
    assert os.listdir(file.parent) == ["report.html"]


def test_a_device_or_a_pipe_is_no_file_to_write(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ConfigError, match=r"--out: .* a device or a pipe"):
            check_writable(path, "--out")
