"""Run folders at a URL: what is copied there, when, and what another machine makes of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest

from rayhive.errors import ConfigError, RayhiveError
from rayhive.remote import COPIES_VARIABLE, MARK, RemoteFolder, is_url, local_folder


@pytest.fixture(params=["memory", "file"])
def url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Return the URL of an empty folder, as seen from a first machine."""
    on_machine(monkeypatch, tmp_path, 1)
    found = (
        f"memory://{tmp_path.name}/run"
        if request.param == "memory"
        else f"file://{tmp_path}/far/run"
    )
    yield found
    fsspec.filesystem("memory").store.clear()


def on_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """Continue on a machine with local copies of its own."""
    monkeypatch.setenv(COPIES_VARIABLE, str(tmp_path / f"machine-{number}"))


def begun(url: str) -> RemoteFolder:
    """Return the run folder of a driver that has taken a URL over."""
    remote = RemoteFolder(url)
    remote.begin()
    remote.claim()
    remote.path.mkdir(parents=True, exist_ok=True)
    return remote


def replicate(folder: Path, trial: int, **files: str) -> Path:
    """Write the folder of a replicate."""
    place = folder / "trials" / str(trial) / "r0-none"
    (place / "logs").mkdir(parents=True, exist_ok=True)
    for name, text in {"events.jsonl": "{}\n", "spec.json": "{}", **files}.items():
        (place / name).write_text(text)
    (place / "logs" / "peer-0.log").write_text("said")
    return place


def database(file: Path, *names: str) -> sqlite3.Connection:
    connection = sqlite3.connect(file)
    with connection:
        connection.execute("CREATE TABLE IF NOT EXISTS trials (name TEXT)")
        connection.executemany("INSERT INTO trials VALUES (?)", [(name,) for name in names])
    return connection


def trials(file: Path) -> list[str]:
    with closing(sqlite3.connect(file)) as connection:
        return [name for (name,) in connection.execute("SELECT name FROM trials")]


def at(url: str) -> dict[str, bytes]:
    """Return the files at a URL, without the mark."""
    fs, root = fsspec.url_to_fs(url)
    names = {str(name)[len(str(root)) :].lstrip("/"): name for name in fs.find(root)}
    return {short: fs.cat_file(name) for short, name in names.items() if short != MARK}


def local(folder: Path) -> set[str]:
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    return found


def test_only_a_scheme_makes_a_url() -> None:
    assert is_url("s3://bucket/run") and is_url("file:///run")
    assert not is_url("runs/quick:start") and not is_url(Path("/runs"))
    assert local_folder("runs/x") == Path("runs/x")


def test_another_machine_gets_the_finished_replicates_and_a_whole_database(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = begun(url)
    (remote.path / "sweep.yaml").write_text("name: x")
    (remote.path / "driver.lock").write_text("this process")
    with closing(database(remote.path / "study.db", "first")) as open_database:
        open_database.execute("INSERT INTO trials VALUES ('not committed')")
        finished = replicate(remote.path, 0, **{"row.cache": "cached"})
        replicate(remote.path, 1)  # still runs
        remote.push(finished)
    one = {f"trials/0/r0-none/{n}" for n in ("events.jsonl", "spec.json", "logs/peer-0.log")}
    assert at(url).keys() == {"sweep.yaml", "study.db", *one}

    on_machine(monkeypatch, tmp_path, 2)
    other = RemoteFolder(url).begin()
    assert local(other) == {"sweep.yaml", "study.db", *one}
    assert trials(other / "study.db") == ["first"]
    assert local(local_folder(url)) == local(other) and local_folder(url) != other


def test_a_copy_that_ends_halfway_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared file system that is full, or when the driver's machine dies."""
    on_machine(monkeypatch, tmp_path, 1)
    url = f"file://{tmp_path}/far/run"
    remote = begun(url)
    with closing(database(remote.path / "study.db", "first")) as open_database:
        remote.push()
        open_database.execute("INSERT INTO trials VALUES ('second')")
        open_database.commit()

    def half(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", half)
        with pytest.raises(RayhiveError, match="No space left"):
            remote.push()
    (tmp_path / "far" / "run" / ".study.db.1.new").write_bytes(b"SQLite")  # of a dead machine
    on_machine(monkeypatch, tmp_path, 2)
    other = RemoteFolder(url).begin()
    assert trials(other / "study.db") == ["first"]
    assert local(other) == {"study.db"}


def test_only_what_has_changed_is_copied(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = begun(url)
    first, second = replicate(remote.path, 0), replicate(remote.path, 1)
    (remote.path / "sweep.yaml").write_text("name: x")
    remote.push(first)
    sent: list[str] = []
    fs = type(fsspec.url_to_fs(url)[0])
    put = fs.put_file

    def counted(self: Any, lpath: str, rpath: str, **kwargs: Any) -> Any:
        to = Path(rpath.partition("/run/")[2])
        name = to.name.removesuffix(f".{os.getpid()}.new")  # of a shared folder
        sent.append(str(to.with_name(name.removeprefix(".") if name != to.name else name)))
        return put(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(fs, "put_file", counted)
    remote.push(first)
    assert sent == []
    remote.push(second)
    assert sent[-1] == "trials/1/r0-none/events.jsonl", "without it the replicate never ran"
    assert len(sent) == 3 and all(name.startswith("trials/1/") for name in sent)
    del sent[:]
    (remote.path / "sweep.yaml").write_text("name: y")
    remote.push()
    assert sent == ["sweep.yaml"]


def test_a_further_attempt_replaces_the_one_before(url: str) -> None:
    remote = begun(url)
    place = replicate(remote.path, 0, **{"events.jsonl": "lost\n"})
    remote.push(place)
    (place / "events.jsonl").rename(place / "events.attempt-0.jsonl")
    (place / "logs").rename(place / "logs.attempt-0")
    replicate(remote.path, 0, **{"events.jsonl": "done\n"})
    remote.push(place)
    names = {name.partition("r0-none/")[2]: text for name, text in at(url).items()}
    assert names == {
        "events.jsonl": b"done\n",
        "events.attempt-0.jsonl": b"lost\n",
        "spec.json": b"{}",
        "logs/peer-0.log": b"said",
        "logs.attempt-0/peer-0.log": b"said",
    }
    fetched = local_folder(url)
    (place / "logs.attempt-0" / "peer-0.log").unlink()
    remote.push(place)
    assert local(local_folder(url)) == {name for name in at(url)} and fetched.is_dir()


def test_the_same_machine_goes_on_with_its_copy_and_sends_what_is_missing(url: str) -> None:
    remote = begun(url)
    remote.push(replicate(remote.path, 0))
    replicate(remote.path, 1)  # finished, and the driver died before it was copied
    again = begun(url)
    assert (again.path / "trials" / "1").is_dir()
    for trial in (0, 1):
        again.push(again.path / "trials" / str(trial) / "r0-none")
    assert sum(name.endswith("events.jsonl") for name in at(url)) == 2


def test_a_copy_that_is_behind_is_set_aside(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = begun(url)
    remote.push(replicate(remote.path, 0))
    on_machine(monkeypatch, tmp_path, 2)
    other = begun(url)
    other.push(replicate(other.path, 1))
    on_machine(monkeypatch, tmp_path, 1)
    assert {path.name for path in (RemoteFolder(url).begin() / "trials").iterdir()} == {"0", "1"}
    (old,) = remote.path.parent.glob("*.old-*")
    assert {path.name for path in (old / "trials").iterdir()} == {"0"}


def test_the_older_of_two_drivers_ends_and_writes_nothing_more(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = begun(url)
    on_machine(monkeypatch, tmp_path, 2)
    begun(url)
    before = at(url)
    with pytest.raises(
        RayhiveError, match=rf"taken over by another driver \(process {os.getpid()}"
    ):
        remote.push(replicate(remote.path, 0))
    assert at(url) == before


def test_a_url_with_other_files_is_refused_and_an_empty_one_has_no_results(url: str) -> None:
    with pytest.raises(ConfigError, match="no file was found there"):
        local_folder(url)
    fs, root = fsspec.url_to_fs(url)
    fs.makedirs(root, exist_ok=True)
    fs.pipe_file(f"{root}/thesis.tex", b"x")
    with pytest.raises(ConfigError, match="or one without files"):
        RemoteFolder(url).begin()


def test_a_url_that_cannot_be_written_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError("denied")

    remote = RemoteFolder(url)
    remote.begin()
    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.url_to_fs(url)[0]), "pipe_file", refuse)
        with pytest.raises(ConfigError, match=r"a URL that can be written \(denied\)"):
            remote.claim()
    remote.claim()
    monkeypatch.setattr(type(fsspec.url_to_fs(url)[0]), "put_file", refuse)
    with pytest.raises(RayhiveError, match="Finished replicates are kept in"):
        remote.push(replicate(remote.path, 0))


def test_a_url_without_a_file_system_is_refused() -> None:
    with pytest.raises(ConfigError, match="or a URL such as s3"):
        RemoteFolder("nowhere://x")


def test_a_file_system_whose_driver_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=r"--out: 's3://bucket/run' .* Install s3fs to access S3"):
        RemoteFolder("s3://bucket/run")


def test_a_mark_that_was_written_in_part_is_of_nobody(url: str) -> None:
    remote = begun(url)
    fs, root = fsspec.url_to_fs(url)
    fs.pipe_file(f"{root}/{MARK}", json.dumps({"session": "x"}).encode()[:5])
    with pytest.raises(RayhiveError, match="taken over"):
        remote.push()
