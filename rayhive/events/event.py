"""Base of all event records, their form as a line of JSON, and the log that holds the lines."""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, KeysView, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rayhive.errors import DamagedError, NewerVersionError
from rayhive.files import is_special

#: Version of the event schema, the key ``v`` of every line. It grows when the meaning of a stored
#: field changes or a required field is added; a new kind or a new optional field leaves it.
VERSION = 1
_END_OF_TIME = 253_402_300_800.0  # the year 10000, which no date can represent


def _whole(value: Any) -> Any:
    """Return a whole number that was stored as a float as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: A number of bytes.
ByteCount = Annotated[int, BeforeValidator(_whole)]

#: Every declared kind of event, and the record that holds it.
KINDS: dict[str, type[Event]] = {}


class Event(BaseModel):
    """Something that happened in a replicate.

    A kind of event is a subclass; an instance of this class itself stands for a kind that this
    version of rayhive does not declare. Fields are read as attributes. The stored fields can also
    be read as those of a mapping: ``event["t"]``, ``event.get("loss")``, ``dict(event)``. An
    optional field that was not stored is None as an attribute, and missing in the mapping.

    Attributes:
        kind: Kind of the event.
        t: Unix time [s], on the clock of the process that made the event.
        peer: Name of the incarnation that the event is about, for example ``peer-0`` or
            ``peer-0.1``; None for the replicate as a whole.
        extra: Stored fields that this version of rayhive does not declare.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)

    kind: str = ""
    t: float = Field(default_factory=time.time, ge=0, lt=_END_OF_TIME)
    peer: str | None = None
    extra: dict[str, Any] = {}

    def __init_subclass__(cls, kind: str | None = None, **kwargs: Any) -> None:
        """Give the records their kind, and enter it into :data:`KINDS`.

        Args:
            kind: The kind; None for a base of several kinds.
            **kwargs: Further arguments of the class statement.

        Raises:
            ValueError: The kind is declared twice.
        """
        super().__init_subclass__(**kwargs)
        if kind in KINDS:
            raise ValueError(f"event kind {kind!r} is declared twice")
        if kind is not None:
            cls.kind = kind  # the field's default
            KINDS[kind] = cls

    def of_peer(self, name: str) -> Event:
        """Return the same event with the peer replaced."""
        return self.model_copy(update={"peer": name})

    # -- reading as a mapping ------------------------------------------------------------------

    def stored(self) -> dict[str, Any]:
        """Return the stored fields by name."""
        names = {"kind", "t", "peer", *self.model_fields_set} - {"extra"}
        return {name: value for name, value in vars(self).items() if name in names} | self.extra

    def keys(self) -> KeysView[str]:
        """Return the names of the stored fields."""
        return self.stored().keys()

    def get(self, name: str, default: Any = None) -> Any:
        """Return a stored field, or ``default`` if it is not stored."""
        return self.stored().get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self.stored()

    def __getitem__(self, name: str) -> Any:
        return self.stored()[name]


E = TypeVar("E", bound=Event)


def of_kind(events: Iterable[Event], record: type[E]) -> Iterator[E]:
    """Yield the events of one kind, typed as its record."""
    return (event for event in events if isinstance(event, record))


def make_event(kind: str, peer: str | None = None, **fields: Any) -> Event:
    """Return a new event that happens now, of a kind that is given by name.

    Fields that the kind does not declare are kept as ``extra``.

    Raises:
        ValueError: ``kind`` is not in :data:`KINDS`, or a field is missing or of another type.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of event: {kind!r}")
    return _record({"kind": kind, "peer": peer, **_lists(fields)})


def dump_event(event: Event | Mapping[str, Any]) -> str:
    """Return one line of JSON, without the line end; non-finite numbers become objects."""
    stored = event.stored() if isinstance(event, Event) else event
    return json.dumps({**_plain(stored), "v": VERSION}, separators=(",", ":"), allow_nan=False)


def load_event(line: str) -> Event:
    """Read one line that :func:`dump_event` wrote, by this version of rayhive or an older one.

    A line without a version is of version 1.

    Raises:
        ValueError: The line is not an event, or a field is missing or of another type.
        NewerVersionError: The line was written with a newer schema.
    """
    try:
        stored = json.loads(line, object_hook=_restore)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(stored, dict) or "t" not in stored or not isinstance(stored.get("kind"), str):
        raise ValueError("an event is an object with kind and t")
    version = stored.pop("v", 1)
    if not isinstance(version, int):
        raise ValueError("v is not a schema version")
    if version > VERSION:
        raise NewerVersionError("an event", version, VERSION)
    return _record(stored)


def _record(stored: dict[str, Any]) -> Event:
    """Return the record of stored fields.

    Raises:
        ValueError: A field is missing or of another type.
    """
    record = KINDS.get(stored["kind"], Event)
    declared = record.model_fields.keys() - {"extra"}
    extra = {name: stored.pop(name) for name in list(stored) if name not in declared}
    try:
        return record(**stored, extra=extra)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{stored['kind']}: {where}: {first['msg']}") from None


def _lists(value: Any) -> Any:
    """Return a value with its tuples as lists, which they are in JSON."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_lists(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _restore(value: dict[str, Any]) -> Any:
    return float(value["float"]) if value.keys() == {"float"} else value


class EventLog:
    """An append-only file of events that survives the death of its writer.

    Args:
        path: The file; created with its folder, appended to if it exists. An incomplete last
            line, left by a writer that died, is removed: the next event would be joined to it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        if self.path.stat().st_size:  # 0 for a device, which may be endless
            written = self.path.read_bytes()
            if not written.endswith(b"\n"):
                self._file.truncate(written.rfind(b"\n") + 1)

    def append(self, event: Event) -> None:
        """Write one event and hand it to the operating system."""
        self._file.write(dump_event(event) + "\n")
        self._file.flush()

    def hold(self) -> None:
        """Lock the file until it is closed or this process dies; :func:`is_held` tells."""
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def sync(self) -> None:
        """Return when everything written is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def is_held(path: str | Path) -> bool:
    """Return whether a living process holds a log; False without a log."""
    try:
        with Path(path).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _opened(path: str | Path) -> BinaryIO:
    path = Path(path)
    try:
        if is_special(path):
            raise DamagedError(path, "not a regular file")
        return path.open("rb")
    except PermissionError as error:
        raise DamagedError(path, "may not be read") from error


def read_events(path: str | Path, kind: str | None = None) -> Iterator[Event]:
    """Yield the events of a log in the order of writing.

    An incomplete last line, left by a writer that died, is left out.

    Args:
        path: The log.
        kind: Kind of the events, for a log that is known to be undamaged: other lines are not
            parsed. By default all events are yielded.

    Raises:
        DamagedError: The log is no regular file or may not be read, or a complete line is not an
            event; the line number is named.
        NewerVersionError: A newer rayhive wrote the log.
    """
    name = None if kind is None else f'"{kind}"'.encode()
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            if name is not None and name not in line:
                continue
            try:
                event = load_event(line.decode("utf-8"))
            except ValueError as error:
                raise DamagedError(path, f", line {number}: not an event: {error}") from error
            except NewerVersionError as error:
                raise NewerVersionError(str(path), error.found, error.known) from None
            if kind is None or event.kind == kind:
                yield event
