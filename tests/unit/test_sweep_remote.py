"""Sweeps whose run folder is at a URL: resumed on another machine, and read from anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rayhive import api
from rayhive.cli import main
from rayhive.remote import COPIES_VARIABLE
from tests.unit.sweep_fakes import TINY, Killed, World


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(COPIES_VARIABLE, str(tmp_path / "first"))
    monkeypatch.chdir(tmp_path)
    return f"file://{tmp_path}/bucket/tiny"


STUDY = {name: value for name, value in TINY.items() if name != "storage"}


def test_a_sweep_goes_on_where_the_lost_machine_had_copied_it(
    url: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = 0

    def tick() -> None:
        nonlocal requests
        requests += 1
        # the second replicate runs: the first one has been copied
        if len(world.starts) == 2:
            world.tick = lambda: None
            raise Killed

    world.tick = tick
    with pytest.raises(Killed):
        api.sweep(STUDY, out=url, progress=False)
    assert requests and sum(world.starts.values()) == 2
    world.live.clear()  # with its machine
    shutil.rmtree(tmp_path / "first")
    finished = list((tmp_path / "bucket" / "tiny").glob("trials/*/*/events.jsonl"))
    assert len(finished) == 1

    monkeypatch.setenv(COPIES_VARIABLE, str(tmp_path / "second"))
    before = finished[0].read_bytes()
    run = api.sweep(STUDY, out=url, progress=False)
    assert run.done is not None and (run.done.trials, run.done.failed) == (2, 0)
    assert finished[0].read_bytes() == before
    assert sorted(world.starts.values()) == [1, 2], "only the unfinished one ran again"
    assert run.folder.is_relative_to(tmp_path / "second")
    assert (tmp_path / "bucket" / "tiny" / "configurations.parquet").is_file()

    monkeypatch.setenv(COPIES_VARIABLE, str(tmp_path / "third"))
    found = api.load(url)
    assert found.table() == run.table()
    again = api.sweep(STUDY, out=url, progress=False)
    assert sum(world.starts.values()) == 3 and again.table() == run.table()


def test_commands_take_the_url(
    url: str, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    api.sweep(STUDY, out=url, progress=False)
    assert main(["results", url, "--format", "csv"]) == 0
    rows = capsys.readouterr().out.strip().splitlines()
    assert len(rows) == 3
    assert main(["report", url, "--out", str(tmp_path / "page.html")]) == 0
    assert "<html" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert main(["retry", url]) == 0
    assert len(world.starts) == 2, "nothing was lost"


def test_mistakes_are_refused_before_anything_starts(
    url: str, tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.yaml").write_text("name: tiny\nworkload: {name: digits}\n")
    assert main(["sweep", "study.yaml", "--out", "nowhere://x"]) == 2
    assert "or a URL such as s3://BUCKET/PATH" in capsys.readouterr().err
    assert main(["results", url]) == 2
    assert "no file was found there" in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "0", "--out", url]) == 2
    assert "only a sweep writes to a URL" in capsys.readouterr().err
    assert not world.starts and not (tmp_path / "bucket").exists()
