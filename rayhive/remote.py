"""Run folders at a URL: on object storage, or on any other file system of fsspec.

A run folder is local while its sweep runs, because a database and an event log need a file system
that appends and locks. A copy at the URL follows it: each finished replicate is there before the
driver counts it. A database is copied as a snapshot. Commands that read a run fetch a local copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rayhive.errors import ConfigError, Problem, RayhiveError, without_secrets
from rayhive.files import first_free, is_unfinished, replaced, write_atomically

#: File at the URL that names the session whose driver writes there.
MARK = "session.json"
#: Variable with the folder of the local copies.
COPIES_VARIABLE = "RAYHIVE_COPIES"
#: Ending of the file beside a local copy that says what the copy is of.
_STATE = ".remote.json"
#: Files of a run folder that stay local: of the processes of this machine, or computed anew.
_LOCAL = ("driver.lock", "row.cache")
_DATABASE = b"SQLite format 3\0"
_JOURNALS = ("-journal", "-wal", "-shm")
_TRIALS = "trials"
#: Uploaded last: without it a replicate counts as one that never ran.
_LAST = "events.jsonl"
#: Pauses before a failed request is repeated [s].
_PAUSES_S = (1.0, 4.0)
_ALLOWED = "a folder, or a URL such as s3://BUCKET/PATH, gs://BUCKET/PATH or file:///PATH"

T = TypeVar("T")


def is_url(place: object) -> bool:
    """Return whether a place is a URL, and not a local path."""
    return "://" in str(place)


def local_folder(place: str | Path, key: str = "DIR") -> Path:
    """Return the local folder of a run; one at a URL is fetched, as far as it has changed.

    Args:
        place: Folder or URL.
        key: The argument with the place, for error messages.

    Raises:
        ConfigError: The URL cannot be read, or holds nothing.
    """
    return RemoteFolder(str(place), key).fetched() if is_url(place) else Path(place)


class RemoteFolder:
    """The run folder at a URL, and its local copy.

    Args:
        url: The URL.
        key: The argument with the URL, for error messages.

    Attributes:
        url: The URL, without passwords.
        path: The local copy of a driver.

    Raises:
        ConfigError: There is no file system for the URL, or its driver is not installed.
    """

    def __init__(self, url: str, key: str = "--out") -> None:
        import fsspec

        self.url, self._key = without_secrets(url).rstrip("/"), key
        try:
            self._fs, root = fsspec.url_to_fs(url)
        except ImportError as error:
            allowed = f"a URL whose file system is installed: {str(error).rstrip('.')}"
            raise ConfigError(Problem(key, self.url, allowed)) from error
        except ValueError as error:
            raise ConfigError(Problem(key, self.url, f"{_ALLOWED} ({error})")) from error
        except Exception as error:  # of the driver of the file system
            allowed = f"a URL that can be opened ({_text(error)})"
            raise ConfigError(Problem(key, self.url, allowed)) from error
        self._root = str(root).rstrip("/")
        digest = hashlib.blake2b(url.rstrip("/").encode(), digest_size=6).hexdigest()
        self._name = f"{PurePosixPath(self._root).name or 'run'}-{digest}"
        self.path = _copies() / "runs" / self._name
        self._session = ""
        self._opened = time.time()
        #: Name of a file -> its size at the URL [bytes], and what of it was sent last.
        self._sizes: dict[str, int] = {}
        self._sent: dict[str, object] = {}

    # -- reading ---------------------------------------------------------------------------------

    def fetched(self) -> Path:
        """Fetch the changes, and return the folder, for readers alone.

        Raises:
            ConfigError: The URL cannot be read, or holds nothing.
        """
        return self._fetch(_copies() / "read" / self._name)

    def _fetch(self, to: Path) -> Path:
        found = self._reading(self._listing)
        if not found:
            raise ConfigError(
                Problem(self._key, self.url, "the URL of a run folder; no file was found there")
            )
        known = _state(to).get("versions", {})
        versions = {name: _version(info) for name, info in found.items()}
        for name, version in versions.items():
            target = to / name
            if known.get(name) != version or not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                with replaced(target) as new:
                    self._reading(lambda: self._fs.get_file(self._at(name), str(new)))  # noqa: B023
        for name in known.keys() - versions.keys():
            (to / name).unlink(missing_ok=True)
        _write_state(to, versions=versions)
        return to

    # -- a driver --------------------------------------------------------------------------------

    def begin(self) -> Path:
        """Return the local copy, up to date; nothing is written at the URL.

        If another machine has continued the run, its state replaces the local copy, which is set
        aside.

        Raises:
            ConfigError: The URL cannot be read, or holds something else.
        """
        mark, found = self._reading(self._mark), self._reading(self._listing)
        known = _state(self.path).get("sessions", [])
        if mark is None and found:
            allowed = "the URL of a run folder, or one without files"
            raise ConfigError(Problem(self._key, self.url, allowed))
        if mark is None or mark.get("session") not in known:
            _set_aside(self.path)
            if mark is not None and found:
                _write_state(self._fetch(self.path), sessions=[mark.get("session")])
        self._sizes = {name: int(info.get("size") or 0) for name, info in found.items()}
        return self.path

    @property
    def is_claimed(self) -> bool:
        """Whether this driver has taken the URL over."""
        return bool(self._session)

    def claim(self) -> None:
        """Take the URL over for this driver; an older one ends at its next replicate.

        Raises:
            ConfigError: The URL cannot be written.
        """
        mark = self._mark()
        before = [] if mark is None else [mark.get("session")]
        self._session = uuid.uuid4().hex
        # Both count: the process may die between the two writes.
        _write_state(self.path, sessions=[*before, self._session])
        try:
            self._write_mark()
        except Exception as error:
            allowed = f"a URL that can be written ({_text(error)})"
            raise ConfigError(Problem(self._key, self.url, allowed)) from error

    def push(self, replicate: Path | None = None) -> None:
        """Copy the files of the run folder, and a finished replicate after them.

        Args:
            replicate: Folder of the replicate; None for none.

        Raises:
            RayhiveError: The URL cannot be written, or another driver has taken it over.
        """
        mark = self._writing(self._mark)
        if mark is None or mark.get("session") != self._session:
            owner = "nobody" if mark is None else mark.get("driver")
            raise RayhiveError(
                f"{self.url} was taken over by another driver ({owner}); the replicates that this "
                f"one finished are kept in {self.path}"
            )
        for file in _files(self.path):
            self._push_top(file)
        if replicate is not None:
            self._push_replicate(replicate)

    def _push_top(self, file: Path) -> None:
        """Copy a file of the run folder itself, if its content has changed."""
        with tempfile.TemporaryDirectory() as folder:
            content = file
            with file.open("rb") as opened:
                database = opened.read(len(_DATABASE)) == _DATABASE
            if database:
                content = Path(folder) / file.name
                _snapshot(file, content)
            digest = hashlib.blake2b(content.read_bytes()).digest()
            if self._sent.get(file.name) != digest:
                self._upload(content, file.name)
                self._sent[file.name] = digest

    def _push_replicate(self, folder: Path) -> None:
        prefix = folder.relative_to(self.path).as_posix()
        files = [file for file in folder.rglob("*") if file.is_file() and _is_shared(file)]
        names = {file.relative_to(self.path).as_posix(): file for file in files}
        for name in sorted(names, key=lambda name: name.endswith(f"/{_LAST}")):
            seen = names[name].stat()
            stamp = seen.st_size, seen.st_mtime_ns
            unchanged = seen.st_mtime < self._opened and self._sizes.get(name) == seen.st_size
            if self._sent.get(name, stamp if unchanged else None) != stamp:
                self._upload(names[name], name)
            self._sent[name] = stamp
        for name in [each for each in self._sizes if each.startswith(f"{prefix}/")]:
            if name not in names:  # of an attempt that has another name now
                self._writing(lambda: self._fs.rm_file(self._at(name)))  # noqa: B023
                del self._sizes[name]

    def _upload(self, file: Path, name: str) -> None:
        self._writing(lambda: self._put(file, name))
        self._sizes[name] = file.stat().st_size

    # -- the file system -------------------------------------------------------------------------

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, file: Path, name: str) -> None:
        self._make_parent(name)
        if not self._on_disk:
            self._fs.put_file(str(file), self._at(name))
            return
        with replaced(Path(self._at(name))) as new:  # half a copy leaves the file of before
            self._fs.put_file(str(file), str(new))

    @property
    def _on_disk(self) -> bool:
        """Whether the URL is a folder that is mounted here."""
        return "file" in _protocols(self._fs)

    def _make_parent(self, name: str) -> None:
        """Make the folder of a file; object storage has none, and might make a bucket instead."""
        if self._on_disk:
            self._fs.makedirs(os.path.dirname(self._at(name)), exist_ok=True)

    def _mark(self) -> dict[str, Any] | None:
        """Return the content of the mark; None if there is none."""
        self._fs.invalidate_cache()
        try:
            found = json.loads(self._fs.cat_file(self._at(MARK)))
        except FileNotFoundError:
            return None
        except ValueError:  # written in part
            return {}
        return found if isinstance(found, dict) else {}

    def _write_mark(self) -> None:
        driver = f"process {os.getpid()} on {socket.gethostname()}"
        mark = {"session": self._session, "driver": driver, "began": time.time()}
        self._make_parent(MARK)
        self._fs.pipe_file(self._at(MARK), json.dumps(mark).encode())

    def _listing(self) -> dict[str, Mapping[str, Any]]:
        """Return the files at the URL by their names below it, without the mark."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        names = {str(at)[len(self._root) :].lstrip("/"): info for at, info in found.items()}
        return {
            name: info
            for name, info in names.items()
            if name not in ("", MARK) and not is_unfinished(Path(name))
        }

    def _reading(self, request: Callable[[], T]) -> T:
        try:
            return _repeated(request)
        except Exception as error:
            allowed = f"a URL that can be read ({_text(error)})"
            raise ConfigError(Problem(self._key, self.url, allowed)) from error

    def _writing(self, request: Callable[[], T]) -> T:
        try:
            return _repeated(request)
        except Exception as error:
            raise RayhiveError(
                f"{self.url} can't be written: {_text(error)}. Finished replicates are kept in "
                f"{self.path}; once it can be, the same command resumes the sweep"
            ) from error


def _repeated(request: Callable[[], T]) -> T:
    """Return the result of a request, which is repeated after errors of the connection."""
    for pause_s in _PAUSES_S:
        try:
            return request()
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            time.sleep(pause_s)
    return request()


def _copies() -> Path:
    """Return the folder of all local copies."""
    given = os.environ.get(COPIES_VARIABLE)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(given).absolute() if given else Path(state) / "rayhive"


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _is_shared(file: Path) -> bool:
    """Return whether a file of a run folder is copied to the URL."""
    return not (file.name in _LOCAL or is_unfinished(file) or file.name.endswith(_JOURNALS))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a run folder itself that are copied to the URL."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and _is_shared(file):
            yield file


def _snapshot(database: Path, to: Path) -> None:
    """Copy an SQLite database that may be in use."""
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(to)) as target:
        source.backup(target)


def _version(info: Mapping[str, Any]) -> str:
    """Return a text that differs for two contents of a file."""
    fields = ("size", "ETag", "etag", "md5Hash", "mtime", "created", "LastModified", "updated")
    return json.dumps([str(info.get(field)) for field in fields])


def _state_file(folder: Path) -> Path:
    return folder.with_name(folder.name + _STATE)


def _state(folder: Path) -> dict[str, Any]:
    """Return the notes about the local copy in a folder."""
    try:
        found = json.loads(_state_file(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_state(folder: Path, **values: Any) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(_state_file(folder), json.dumps({**_state(folder), **values}))


def _set_aside(folder: Path) -> None:
    """Rename a local copy, if there is one, that is not that of the URL."""
    _state_file(folder).unlink(missing_ok=True)
    if folder.exists():
        folder.rename(first_free(lambda number: folder.with_name(f"{folder.name}.old-{number}")))


def _text(error: BaseException) -> str:
    return without_secrets(str(error).strip() or repr(error))
