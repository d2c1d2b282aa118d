"""Base of all event records, and their form as a line of JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rayhive.errors import NewerVersionError

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
    _mapping_keys: ClassVar[tuple[str, ...]] = ("kind", "t", "peer")

    kind: str
    t: float = Field(default_factory=time.time, ge=0, lt=_END_OF_TIME)
    peer: str | None = None
    extra: dict[str, Any] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Enter a kind into :data:`KINDS`.

        Raises:
            ValueError: The kind is declared twice.
        """
        kind = cls.model_fields["kind"].default
        if not isinstance(kind, str):  # a base of several kinds
            return
        if kind in KINDS:
            raise ValueError(f"event kind {kind!r} is declared twice")
        KINDS[kind] = cls

    def of_peer(self, name: str) -> Event:
        """Return the same event with the peer replaced."""
        return self.model_copy(update={"peer": name})

    # -- reading as a mapping ------------------------------------------------------------------

    def keys(self) -> list[str]:
        """Return the names of the stored fields."""
        first = self._mapping_keys
        stored = (
            name
            for name in type(self).model_fields
            if name in self.model_fields_set and name not in (*first, "extra")
        )
        return [*first, *stored, *self.extra]

    def items(self) -> list[tuple[str, Any]]:
        """Return names and values of the stored fields."""
        return [(name, self[name]) for name in self.keys()]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a stored field, or ``default`` if it is not stored."""
        try:
            return self[name]
        except KeyError:
            return default

    def __contains__(self, name: object) -> bool:
        return self._is_stored(name) or name in self.extra

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name) if self._is_stored(name) else self.extra[name]

    def _is_stored(self, name: object) -> bool:
        stored = name in self.model_fields_set or name in self._mapping_keys
        return stored and name != "extra"


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
    stored = {**_plain(dict(event)), "v": VERSION}
    return json.dumps(stored, separators=(",", ":"), allow_nan=False)


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
    if not isinstance(stored, dict) or not isinstance(stored.get("kind"), str):
        raise ValueError("an event is an object with kind and t")
    if "t" not in stored:
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
    extra = {name: value for name, value in stored.items() if name not in declared}
    given = {name: value for name, value in stored.items() if name in declared}
    try:
        return record(**given, extra=extra)
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
